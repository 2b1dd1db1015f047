"""Peers that break the protocol, and inputs beyond the limits."""
