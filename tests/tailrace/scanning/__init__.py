"""Tests of the room `tailrace/scanning`."""
