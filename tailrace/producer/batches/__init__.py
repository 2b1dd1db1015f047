"""Batches of a producer and their partitions' queues, from the first record to the outcome."""
