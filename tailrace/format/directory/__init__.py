"""Files of a data directory beside its segments, and file operations."""
