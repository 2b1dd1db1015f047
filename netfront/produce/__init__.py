"""PRODUCE requests: batches into lanes, acks back."""
