"""Open connections of the console: their limit, and the time that each may take.

Owner: the agent's thread adds and ends them; the thread of each connection says how far it is.
Invariants:
- At most CONNECTIONS_MAX connections are open. When all are taken, the oldest that has not sent its
  request is closed.
- At most STREAMS_MAX of the connections are streams (the page's events), beside the limit above. A
  stream is closed if a message of it is not taken STREAM_TIMEOUT_S after the one before.
- A connection is closed if its request is not complete REQUEST_TIMEOUT_S after the console began to
  read it, or its answer not taken after ANSWER_TIMEOUT_S, however steadily it trickles.
- A time that another thread sets is never before the one that the agent's thread has read, so it
  needs no wake.
"""

from __future__ import annotations

import enum
import socket
import threading
from typing import NamedTuple

REQUEST_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 20.0
"""Longest time of a connection from when its request is read. A scrape of a front that does not
answer takes several `appliance.observe.metrics.scrape.ASK_TIMEOUT_MS`.
"""
CONNECTIONS_MAX = 16
STREAMS_MAX = 32
STREAM_TIMEOUT_S = 40.0
"""Longest time between two messages of a stream, which sends one at least each 15 s."""
NS_PER_S = 1_000_000_000
_REQUEST_NS = int(REQUEST_TIMEOUT_S * NS_PER_S)
_STREAM_NS = int(STREAM_TIMEOUT_S * NS_PER_S)
_ANSWER_NS = int((ANSWER_TIMEOUT_S - REQUEST_TIMEOUT_S) * NS_PER_S)


class _State(enum.Enum):
    ACCEPTED = enum.auto()
    """Its thread imports the modules that read it, or waits until another has."""
    READING = enum.auto()
    ASKED = enum.auto()
    """Its request has come."""


class _Open(NamedTuple):
    end_ns: int
    """Time when it is closed."""
    state: _State


class OpenConnections:
    """Connections, the oldest first. Safe in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Open] = {}
        self._streams: dict[socket.socket, int] = {}
        """Stream -> when it is closed."""

    def add(self, connection: socket.socket, now_ns: int) -> bool:
        """Register a connection; False if the limit is reached and each has sent its request."""
        with self._lock:
            if len(self._open) >= CONNECTIONS_MAX:
                silent = next(
                    (c for c, known in self._open.items() if known.state is not _State.ASKED), None
                )
                if silent is None:
                    return False
                self._end(silent)
            self._open[connection] = _Open(now_ns + _REQUEST_NS, _State.ACCEPTED)
            return True

    def begin_request(self, connection: socket.socket, now_ns: int) -> None:
        """The console begins to read it."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = _Open(now_ns + _REQUEST_NS, _State.READING)

    def has_asked(self, connection: socket.socket) -> None:
        """Its request has come."""
        with self._lock:
            if connection in self._open:
                end_ns = self._open[connection].end_ns + _ANSWER_NS
                self._open[connection] = _Open(end_ns, _State.ASKED)

    def begin_stream(self, connection: socket.socket, now_ns: int) -> bool:
        """Make a connection a stream, which has no end; False if there are STREAMS_MAX."""
        with self._lock:
            if connection not in self._open or len(self._streams) >= STREAMS_MAX:
                return False
            del self._open[connection]
            self._streams[connection] = now_ns + _STREAM_NS
            return True

    def has_sent(self, connection: socket.socket, now_ns: int) -> None:
        """A stream's client has taken a message."""
        with self._lock:
            if connection in self._streams:
                self._streams[connection] = now_ns + _STREAM_NS

    def remove(self, connection: socket.socket) -> None:
        """Forget a connection that its thread closes."""
        with self._lock:
            self._open.pop(connection, None)
            self._streams.pop(connection, None)

    def end_late(self, now_ns: int) -> None:
        """End the connections whose time is over. The time of the client has not begun while the
        console imports.
        """
        with self._lock:
            for connection, (end_ns, state) in list(self._open.items()):
                if now_ns >= end_ns:
                    if state is _State.ACCEPTED:
                        self._open[connection] = _Open(now_ns + _REQUEST_NS, state)
                    else:
                        self._end(connection)
            for connection, end_ns in list(self._streams.items()):
                if now_ns >= end_ns:
                    self._end(connection)

    def next_end_ns(self) -> int | None:
        """The next end of a connection's time, when `end_late` has something to do; None: never."""
        with self._lock:
            ends = [known.end_ns for known in self._open.values()]
            return min([*ends, *self._streams.values()], default=None)

    def _end(self, connection: socket.socket) -> None:
        """Shut a connection down. Its thread sees the end in any wait, and closes it."""
        self._open.pop(connection, None)
        self._streams.pop(connection, None)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client was quicker
