"""Topics and their offsets, as a client looks them up and creates them."""
