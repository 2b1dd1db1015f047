"""Cleaner: writes the segments of compacted topics again, without what was superseded."""
