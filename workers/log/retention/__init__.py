"""Retention of a log: expiry of segments, leases against it, jumps of the wall clock."""
