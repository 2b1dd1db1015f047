"""Spark reads topics."""
