"""Who owns the log: the worker appends, the flusher writes."""
