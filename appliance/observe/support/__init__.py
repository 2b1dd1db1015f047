"""The support archive of `tailrace doctor --bundle`."""
