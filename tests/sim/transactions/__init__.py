"""Schedules of transactions: their programs, checks, and the faults planted to test the checks."""
