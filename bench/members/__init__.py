"""Consumer groups and queues: commits, rebalances, wide groups."""
