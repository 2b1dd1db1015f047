"""Tests of `tailrace.groups`."""
