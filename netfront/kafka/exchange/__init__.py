"""Requests of Kafka clients as requests to this process's front."""
