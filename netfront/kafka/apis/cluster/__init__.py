"""Metadata of brokers and topics, coordinators."""
