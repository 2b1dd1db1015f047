"""TCP ports for servers that are told their port before they take it."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20_000, 32_000
"""Below the ports that the kernel gives to connections and to servers that ask for any."""


def free_port() -> int:
    """A port on which nobody listens, and which the kernel gives to nobody."""
    for port in random.sample(range(FIRST, LAST), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("100 ports are taken")
