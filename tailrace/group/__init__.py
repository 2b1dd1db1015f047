"""The member's side of consumer groups. Imported by the first consumer with a `group_id`."""
