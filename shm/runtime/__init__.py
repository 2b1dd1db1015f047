"""What every process of the appliance has: how it begins, what bounds a failure to one message, what it logs."""
