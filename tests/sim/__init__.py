"""The whole appliance and its clients, stepped in one process by a seeded scheduler."""
