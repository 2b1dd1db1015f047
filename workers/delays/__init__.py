"""Delayed records: what the scheduler is made of. Only `scheduler` and what it loads lazily may know numpy and pyarrow."""
