"""Tests of appliance.cli.commands.users."""
