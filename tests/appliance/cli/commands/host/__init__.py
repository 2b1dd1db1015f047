"""Tests of appliance.cli.commands.host."""
