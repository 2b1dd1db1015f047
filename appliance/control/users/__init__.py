"""Users and ACLs: requests to the controller, and to a data directory that is not served."""
