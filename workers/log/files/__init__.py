"""Files of a partition that are written: active segment, journal, partition.json, delay manifest."""
