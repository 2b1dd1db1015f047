"""Tests of shm.rights."""
