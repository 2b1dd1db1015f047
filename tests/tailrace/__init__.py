"""Tests of tailrace."""
