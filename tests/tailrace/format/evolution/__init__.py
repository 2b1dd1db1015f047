"""Tests of tailrace.format.segments."""
