"""Exports of topics into a data lake, exactly once: Parquet,
Arrow files, Delta Lake and Iceberg.
"""
