"""Streaming reads of topics."""
