"""Partitions that move to another data directory."""
