"""Conversion of Kafka's record batches."""
