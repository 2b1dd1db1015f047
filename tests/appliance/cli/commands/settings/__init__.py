"""Tests of appliance.cli.commands.settings."""
