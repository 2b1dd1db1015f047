"""Logs in files of a test's own, written, damaged and recovered without processes."""
