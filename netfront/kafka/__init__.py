"""Front processes, their Kafka gateway: see `netfront.kafka.gateway`."""
