"""Classic and consumer groups, their offsets and administration."""
