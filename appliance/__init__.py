"""Who owns the processes and the decisions: supervisor, coordinator, command line."""
