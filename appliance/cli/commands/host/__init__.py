"""Commands about the appliance and this host."""
