"""Configuration files: reading, positions of their keys, and the file that an installation gets."""
