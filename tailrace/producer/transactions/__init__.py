"""Transactions of a producer with a transactional id."""
