"""Tests of tailrace.format.record_batch."""
