"""Fuzzers: what clients send, bent in every way (`protocol`), against real processes. `make fuzz
SECONDS=600 SEED=1`; CI runs short ones.
"""
