"""What a backup reads: the files of a data directory at one point of the log."""
