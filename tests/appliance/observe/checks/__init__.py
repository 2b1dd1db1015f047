"""Tests of appliance.observe.checks."""
