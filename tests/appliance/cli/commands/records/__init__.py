"""Tests of appliance.cli.commands.records."""
