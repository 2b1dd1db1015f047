"""Kafka's messages as bytes."""
