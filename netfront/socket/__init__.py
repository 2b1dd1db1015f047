"""The ROUTER socket and its connections."""
