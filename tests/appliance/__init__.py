"""Tests of appliance."""
