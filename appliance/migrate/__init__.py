"""Moving house: topics, records and committed offsets between Kafka and the appliance."""
