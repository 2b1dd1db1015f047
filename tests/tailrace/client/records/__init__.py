"""Tests of tailrace.client.records."""
