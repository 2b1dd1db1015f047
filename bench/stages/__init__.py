"""What a batch costs at each stage, and what follows for more cores."""
