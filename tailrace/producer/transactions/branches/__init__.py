"""Branches of a transaction: programs that write a part of it (see `docs/transactions.md`)."""
