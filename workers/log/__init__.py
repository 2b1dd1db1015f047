"""Log of a partition: its segments, producer state, recovery and retention."""
