"""The controller: decides about topics and publishes their metadata."""
