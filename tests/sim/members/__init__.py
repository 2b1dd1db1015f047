"""Programs of a schedule that are members of consumer groups and share groups."""
