"""Store of waiting delayed rows, in memory and in bucket files."""
