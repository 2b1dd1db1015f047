"""Fuzzers: malformed requests (`protocol`), damaged files (`files`) and random programs of public
calls (`programs`), against real processes. `make fuzz SECONDS=600 SEED=1`; CI runs short ones.
"""
