"""Branches of transactions: producers under which other processes write for a transactional id."""
