"""A group of batches on its way to the disk: from the ring, to its places, written and synced."""
