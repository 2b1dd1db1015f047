"""Workers and flushers: the worker appends batches, the flusher writes them to segment files."""
