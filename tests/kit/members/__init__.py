"""Members of consumer groups and of share groups."""
