"""Schedules of compacted topics."""
