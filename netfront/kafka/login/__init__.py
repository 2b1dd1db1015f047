"""Logins of Kafka clients: SASL's mechanisms, and the users that they prove."""
