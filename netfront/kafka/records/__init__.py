"""Kafka's record batches (magic 2) to and from batches of a topic's log, for the Kafka gateway."""
