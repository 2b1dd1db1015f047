"""The log that a front reads: segment files, their indexes, whole batches up to an end."""
