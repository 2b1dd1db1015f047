"""Exports, without an appliance."""
