"""Tests of netfront."""
