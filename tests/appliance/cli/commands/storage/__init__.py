"""Tests of appliance.cli.commands.storage."""
