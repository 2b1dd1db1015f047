"""The simulated machine: clock, disks, network, and the appliance's processes on it."""
