"""One connection to a front: its socket, the calls on it, and operations as steps."""
