"""Fetch sessions of a set of partitions."""
