"""Record batches: their header, Arrow metadata, checks, and batches without rows."""
