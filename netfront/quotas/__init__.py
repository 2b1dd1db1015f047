"""Quotas of a front's sessions. Imported by a front that has any."""
