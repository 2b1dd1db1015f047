"""Whole topics read as tables."""
