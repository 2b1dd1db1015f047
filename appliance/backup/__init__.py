"""Backups of the appliance, and their restore: `tailrace backup`, `tailrace restore`."""
