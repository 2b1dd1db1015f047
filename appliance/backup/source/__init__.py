"""Source of a backup: the files of a data directory at one point of the log."""
