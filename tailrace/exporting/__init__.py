"""Topics copied into a lake, exactly once: Parquet and Arrow files, Delta Lake, Iceberg."""
