"""Placement of partitions on workers."""
