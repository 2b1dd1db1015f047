"""Table: the latest value of each key of a topic, kept in memory and up to date."""
