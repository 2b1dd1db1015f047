"""Due times of delayed and recurring records."""
