"""Prometheus metrics: what a scrape asks, and the families that it becomes."""
