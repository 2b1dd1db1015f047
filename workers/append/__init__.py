"""Worker process: assigns offsets and publishes batches in its ring."""
