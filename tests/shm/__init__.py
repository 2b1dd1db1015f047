"""Tests of shm."""
