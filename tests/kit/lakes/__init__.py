"""Exports and Spark: what is sent, and the lake as its readers see it."""
