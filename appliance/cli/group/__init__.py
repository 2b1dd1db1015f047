"""Parts of `tailrace group`: advice on consumers, and new offsets."""
