"""Writes into topics, batch and streaming, each row once."""
