"""Commands about data directories, partitions on them, and backups."""
