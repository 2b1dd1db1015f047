"""Tests of tailrace.client.config."""
