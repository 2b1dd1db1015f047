"""The console's page: its files, the state that it shows, and what it may change."""
