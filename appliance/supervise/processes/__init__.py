"""The processes of the appliance: how they start, end, and are restarted."""
