"""The process of groups."""
