"""Rights of Kafka clients: what each API needs, and how Kafka says that it is not allowed."""
