"""A partition of a share group: acquired and acknowledged ranges of offsets."""
