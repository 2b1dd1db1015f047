"""Fuzzers of the gateway: bent requests of Kafka's APIs, and fields at their boundaries."""
