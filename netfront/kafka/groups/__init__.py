"""Kafka's classic groups: members, generations, and the assignments that their leaders make."""
