"""State of a running appliance at a glance, for `tailrace top` and `tailrace status`."""
