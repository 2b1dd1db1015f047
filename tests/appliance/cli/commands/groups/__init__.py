"""Tests of appliance.cli.commands.groups."""
