"""FETCH, METADATA and LIST_OFFSETS, read from segment files."""
