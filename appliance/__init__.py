"""Who owns the processes and the decisions: supervisor, coordinator, command line."""

__version__ = "0.1.0"
"""That of `tailrace`, in which it runs; `tailrace.launcher` compares them."""
