"""One connection to an appliance: its socket, settings and topic metadata."""
