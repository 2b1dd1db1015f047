"""Tests of appliance.cli.commands.monitoring."""
