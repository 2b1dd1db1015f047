"""Offsets of a group's member: positions, commits, and what is committed."""
