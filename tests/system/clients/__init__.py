"""Clients of one process: threads, event loops, callbacks, forks, ends of programs."""
