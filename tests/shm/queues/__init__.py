"""Tests of shm.queues."""
