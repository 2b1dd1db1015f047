"""Decisions: durable, on their way to the workers, and asked for by workers."""
