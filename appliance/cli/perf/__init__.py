"""`tailrace perf`: measurements, and one command for each."""
