"""Tests of tailrace.client.connections."""
