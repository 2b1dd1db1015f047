"""Tests that break things: power, disks, processes, bits."""
