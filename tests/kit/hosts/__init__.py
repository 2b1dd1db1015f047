"""Surroundings of a process on a host: programs, file systems, clocks, databases, networks."""
