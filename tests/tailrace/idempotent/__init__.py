"""Tests of tailrace.idempotent, without an appliance."""
