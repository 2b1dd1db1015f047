"""Settings of the appliance and of topics."""
