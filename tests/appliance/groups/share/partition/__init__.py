"""Tests of appliance.groups.share.partition."""
