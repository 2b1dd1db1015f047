"""A consumer's side of consumer groups. Imported by the first consumer that has a `group_id`."""
