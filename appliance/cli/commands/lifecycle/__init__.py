"""Commands that start the appliance, restart it, and have it use another configuration."""
