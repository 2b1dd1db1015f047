"""Kafka and Tailrace as source and as target of a migration."""
