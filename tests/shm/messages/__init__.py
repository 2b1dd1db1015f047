"""Tests of shm.messages."""
