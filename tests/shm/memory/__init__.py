"""Tests of shm.memory."""
