"""Quotas of users and clients: their rules, and the token buckets that rates are measured by."""
