"""The latest record of each key: which offsets of a plan have one, and the reader of these rows."""
