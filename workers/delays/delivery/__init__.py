"""Delivery of delayed records: marks that close ordinals, the rows that are due, their batches."""
