"""Tests of the suite's own machinery."""
