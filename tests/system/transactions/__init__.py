"""Transactions over topics, delays and groups."""
