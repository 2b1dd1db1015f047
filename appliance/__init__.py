"""The processes that own and decide: supervisor, controller, group coordinator, console, command
line.
"""

__version__ = "0.1.0"
"""The version of `tailrace`, which contains this package; `tailrace.launcher` compares both."""
