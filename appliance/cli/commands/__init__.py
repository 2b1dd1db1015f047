"""The commands of `tailrace`, one file each."""
