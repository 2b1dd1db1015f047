"""The database of groups: its tables, transactions, queries and files."""
