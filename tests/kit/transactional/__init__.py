"""Transactions: their batches, writers, readers and checker."""
