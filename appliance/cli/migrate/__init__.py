"""Parts of `tailrace migrate`: its two clusters, its run, what it prints."""
