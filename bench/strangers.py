"""A flood of strangers: connections that begin a CURVE handshake and never end it, `RATE` a second,
for SECONDS. `python -m bench.strangers HOST PORT RATE SECONDS`; prints how many there were.
"""

from __future__ import annotations

import socket
import sys
from collections import deque

from bench.measure import paced

GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 1]) + b"CURVE".ljust(20, b"\0") + bytes(32)
HELLO = b"\x04\xc8\x05HELLO" + bytes([1, 0]) + bytes(72) + bytes(32 + 8 + 80)
HELD = 500
"""Connections that are open at a time."""


def main() -> None:
    host, port, rate, seconds = sys.argv[1:]
    held: deque[socket.socket] = deque()
    count = 0
    for _ in paced(int(rate), int(float(rate) * float(seconds))):
        try:
            stranger = socket.create_connection((host, int(port)), 5)
            stranger.sendall(GREETING + HELLO)
        except OSError:
            continue
        count += 1
        held.append(stranger)
        if len(held) > HELD:
            held.popleft().close()
    print(count)


if __name__ == "__main__":
    main()
