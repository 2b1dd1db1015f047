"""Log lines: events with fields, their advice, the journal, slow operations."""
