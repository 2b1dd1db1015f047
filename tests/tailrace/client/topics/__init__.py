"""Tests of tailrace.client.topics."""
