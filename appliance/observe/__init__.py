"""Metrics, health, checks."""
