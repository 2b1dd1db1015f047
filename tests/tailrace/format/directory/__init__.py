"""Tests of tailrace.format.directory."""
