"""Transactions beside the same work without them."""
