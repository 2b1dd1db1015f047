"""Tests of `tailrace.group`."""
