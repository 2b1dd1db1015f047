"""Data directories: identity, lock, the manifest of shared memory."""
