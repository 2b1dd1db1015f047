"""Delayed records: the scheduler process.

Only `scheduler` and its lazy imports may use numpy and pyarrow.
"""
