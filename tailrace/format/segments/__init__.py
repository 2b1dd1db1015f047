"""Segment files and the indexes beside them."""
