"""Tests of shm.tables."""
