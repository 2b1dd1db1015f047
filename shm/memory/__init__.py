"""Regions of shared memory, their layout and their atomic words."""
