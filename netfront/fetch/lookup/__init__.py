"""Lookups of a front: METADATA and LIST_OFFSETS, with searches by timestamp."""
