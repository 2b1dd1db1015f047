"""Messages of lanes, encoded and decoded."""
