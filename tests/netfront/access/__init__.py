"""Tests of netfront.access."""
