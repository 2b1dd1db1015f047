"""Benchmarks: ratios on one machine, results kept with machine and commit."""
