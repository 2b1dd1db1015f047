"""Commands that show and check the appliance and its host."""
