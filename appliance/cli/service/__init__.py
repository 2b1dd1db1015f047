"""The appliance as a service of this host: its installation and removal."""
