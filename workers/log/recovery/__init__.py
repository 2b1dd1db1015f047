"""Recovery of a log at start: the decision table and its execution."""
