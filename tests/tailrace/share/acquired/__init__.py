"""Tests of `tailrace.share.acquired`."""
