"""The author of a schema version, as a client names it."""

from __future__ import annotations

AUTHOR_MAX = 128


def author() -> str:
    """The user of this process, `user@host`; empty if it cannot be told."""
    import getpass
    import socket

    try:
        text = f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError, ImportError):
        return ""
    return text if text.isprintable() and len(text) <= AUTHOR_MAX else ""
