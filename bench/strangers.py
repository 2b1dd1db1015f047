"""A flood of strangers: connections that begin a CURVE handshake and never end it, `RATE` a second,
for SECONDS. `python -m bench.strangers HOST PORT RATE SECONDS`; prints how many there were, how
many of them the appliance has taken, and the seconds that it took.

It waits for none of them, as real ones do not: a connection that is not there yet is given up when
HELD others have been begun after it.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import OrderedDict

from bench.measure import paced

GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 1]) + b"CURVE".ljust(20, b"\0") + bytes(32)
HELLO = b"\x04\xc8\x05HELLO" + bytes([1, 0]) + bytes(72) + bytes(32 + 8 + 80)
HELD = 500
"""Connections that are open at a time."""
_OUT = select.EPOLLOUT | select.EPOLLONESHOT


def main() -> None:
    host, port, rate, seconds = sys.argv[1:]
    poller = select.epoll()
    held = OrderedDict[int, socket.socket]()
    count = taken = 0
    begun = time.perf_counter()
    for _ in paced(int(rate), int(float(rate) * float(seconds))):
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex((host, int(port)))
        poller.register(stranger, _OUT)
        held[stranger.fileno()] = stranger
        count += 1
        for fd, _ in poller.poll(0):
            try:
                taken += held[fd].send(GREETING + HELLO) > 0
            except OSError:
                continue
        if len(held) > HELD:
            held.popitem(last=False)[1].close()
    print(count, taken, time.perf_counter() - begun)


if __name__ == "__main__":
    main()
