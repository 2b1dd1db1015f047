"""Requests of an operator to the running supervisor: restarts, upgrade, reload."""
