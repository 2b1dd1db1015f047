"""The catalog: topics and settings in SQLite."""
