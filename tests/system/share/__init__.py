"""Share groups (queues) with the real coordinator."""
