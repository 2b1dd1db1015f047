"""Files of a partition as they are written: active segment, journal, partition.json, manifest."""
