"""Checks on demand: of the host, the settings of a start, and the files of the log."""
