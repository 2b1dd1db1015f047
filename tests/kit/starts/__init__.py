"""Starts of the appliances that tests run."""
