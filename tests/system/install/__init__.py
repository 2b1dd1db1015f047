"""Packages, units, containers and the first minutes of a new user."""
