"""Migration: topics, records and committed offsets between Kafka and the appliance."""
