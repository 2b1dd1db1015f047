"""Records of a client: their partition, their bytes, and their part in a transaction."""
