"""Reads of whole logs: scans, SQL, the latest of each key, exports."""
