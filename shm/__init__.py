"""Shared memory between processes: regions, words, rings, lanes and doorbells."""
