"""Publishing of the controller's metadata to the other processes, over their lanes."""
