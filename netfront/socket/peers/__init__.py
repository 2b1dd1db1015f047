"""Connections of a front: who is there, what each costs, and which are closed."""
