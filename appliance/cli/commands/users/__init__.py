"""Commands for users, their rights and keys."""
