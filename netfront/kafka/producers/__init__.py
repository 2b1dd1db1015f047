"""Transactional producers of Kafka clients, as the gateway knows them."""
