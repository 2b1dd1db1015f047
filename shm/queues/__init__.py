"""Queues between processes: rings of batches, lanes of messages, doorbells of sleeping readers."""
