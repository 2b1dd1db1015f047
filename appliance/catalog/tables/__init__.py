"""Tables of the catalog beside those of topics: producer ids, schemas, slots, settings, users."""
