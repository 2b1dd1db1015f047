"""Requests about transactions: their fields, the rules of prepared ones, and those that wait."""
