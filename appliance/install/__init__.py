"""Installation of the appliance as a service of a host with systemd."""
