"""Clients and fronts that say exactly what a test wants, well formed or not."""
