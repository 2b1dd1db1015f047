"""Consumer groups with the real coordinator."""
