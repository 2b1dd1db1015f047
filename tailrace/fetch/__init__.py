"""Fetching: the partitions' cursors, fetch requests, and the buffer of fetched records."""
