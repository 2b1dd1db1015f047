"""Tests of appliance.cli.commands.lifecycle."""
