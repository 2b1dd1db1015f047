"""Settings of the clients, and the names that other clients call them by."""
