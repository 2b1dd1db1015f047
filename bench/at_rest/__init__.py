"""Starts, restarts, recovery, and an appliance that does nothing."""
