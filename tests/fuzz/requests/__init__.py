"""Requests of Tailrace's protocol, valid and bent, and the peer that sends them."""
