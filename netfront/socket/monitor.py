"""Monitor: libzmq's reports of connections that begin and end.

Owner: one front.

Invariants: libzmq's thread blocks while the monitor is full. A connection is reported before its
first message.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

import zmq

from netfront.socket.peers.connections import Connections

EVENTS_AT_ONCE = 2_100
"""More events than the monitor holds: 1,000 messages on each side."""
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
_ACCEPTED, _DISCONNECTED, _ACCEPT_FAILED = (
    int(zmq.EVENT_ACCEPTED),
    int(zmq.EVENT_DISCONNECTED),
    int(zmq.EVENT_ACCEPT_FAILED),
)
"""Plain integers, because operations on enum members run Python code."""
_EVENT = struct.Struct("=HI")


class Read(NamedTuple):
    """The outcome of a look at the monitor."""

    has_more: bool
    failure: str
    """The reason why a connection could not be accepted; "": none."""


class Monitor:
    """The monitor socket of a ROUTER socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        address = f"inproc://monitor-{id(self)}"
        watched.monitor(address, _ACCEPTED | _DISCONNECTED | _ACCEPT_FAILED)
        self.socket = context.socket(zmq.PAIR)
        self.socket.connect(address)
        self.fd = int(self.socket.getsockopt(zmq.FD))
        self.had_events_ns = 0
        """Time when it last had events."""

    def read(self, peers: Connections, now_ns: int, empty_count: int) -> Read:
        """Record the pending events, at most EVENTS_AT_ONCE: without free descriptors libzmq
        reports accept failures without end.
        """
        failure, accepted, has_more = "", dict[int, bool](), False
        for _ in range(EVENTS_AT_ONCE):
            if not int(self.socket.get(_EVENTS)) & _POLLIN:
                break
            self.had_events_ns = now_ns
            message, endpoint = self.socket.recv_multipart(_NOBLOCK)
            event, value = _EVENT.unpack(message)
            if event == _ACCEPTED:
                accepted[value] = endpoint.startswith(b"tcp://")
            elif event == _DISCONNECTED:
                is_counted = accepted.pop(value, None)
                if is_counted is None:
                    peers.disconnected(value, now_ns, empty_count)
                else:
                    peers.came_and_went(value, now_ns, empty_count, is_counted=is_counted)
            elif event == _ACCEPT_FAILED:
                failure = os.strerror(value)
        else:
            has_more = True
        for fd, is_counted in accepted.items():
            peers.accepted(fd, is_counted, now_ns)
        return Read(has_more, failure)

    def close(self) -> None:
        """Stop the reports."""
        self._watched.disable_monitor()
        self.socket.close(0)
