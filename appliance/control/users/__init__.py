"""Users and ACLs: requests to the controller, and to a data directory that nobody serves."""
