"""Requests about delayed records: list, describe, cancel and reschedule."""
