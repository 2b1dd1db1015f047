"""Scans of the log as tables: a planner, and a reader from local files or over ZeroMQ."""
