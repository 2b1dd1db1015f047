"""The store of a table, without an appliance."""
