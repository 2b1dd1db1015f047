"""Peers on the same cores, disk and data, interleaved with ours in one run: `make bench-peers
[ROUNDS=5] [ONLY=text]`. See __main__.py.
"""
