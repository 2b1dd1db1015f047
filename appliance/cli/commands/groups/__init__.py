"""Commands about groups and transactions."""
