"""Batch reads of topics."""
