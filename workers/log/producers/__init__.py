"""Producers of a partition: sequences, open transactions, delay positions, their rules and
snapshots.
"""
