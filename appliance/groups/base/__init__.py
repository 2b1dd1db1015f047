"""Parts that groups of both kinds share: messages, request validation, limits, assignors."""
