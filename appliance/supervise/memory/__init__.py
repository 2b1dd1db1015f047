"""Shared memory of the appliance: its plan, its regions, and what a crash left behind."""
