"""Flusher process: writes batches from rings to segment files, durable in groups."""
