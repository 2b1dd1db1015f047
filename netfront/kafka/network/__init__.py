"""Sockets of Kafka clients."""
