"""Tables in shared memory that one process writes and others read: partitions, processes."""
