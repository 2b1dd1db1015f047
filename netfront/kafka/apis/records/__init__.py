"""Produce, Fetch and offsets of records."""
