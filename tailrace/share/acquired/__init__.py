"""Acquired records: locked for this member, being fetched, not delivered yet."""
