"""Parts that groups of both kinds share: storage, messages, limits, assignors."""
