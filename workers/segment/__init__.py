"""Segment files: reading, indexes, checkpoints and quarantine."""
