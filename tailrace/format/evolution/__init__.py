"""Evolution of typed topics: the rules by which schemas change, and rows of older versions."""
