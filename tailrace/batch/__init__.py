"""Conversion of records and frames to Arrow batches, and back."""
