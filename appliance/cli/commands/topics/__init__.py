"""Commands about topics: their settings, delayed records and segment files."""
