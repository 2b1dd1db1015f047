"""Tests of appliance.catalog.tables."""
