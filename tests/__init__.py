"""Tests of Tailrace; the tree mirrors the packages."""
