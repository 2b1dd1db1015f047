"""What a client takes from the world around it: the clock, sockets, sleep, chance, and whether it may have a thread. Tests put another world in.

`REAL` is ZeroMQ and the monotonic clock. A ClientSocket is one DEALER: non-blocking, frames in and out.
"""

from __future__ import annotations

import errno
import random
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from tailrace.errors import InvalidSettingError
from tailrace.formats.checksum import Readable
from tailrace.protocol.wire import BATCH_CEILING_BYTES

FRAME_MAX_BYTES = 2 * BATCH_CEILING_BYTES
"""What a fetch may answer, and a batch more: a peer that sends a larger frame is no appliance, and ZeroMQ drops it before reading."""
RECONNECT_MS = 20
RECONNECT_MAX_MS = 60
"""A client that was there before the appliance connects within 100 ms of its start: libzmq adds up to RECONNECT_MS by chance."""
NEAR_SEND_BUFFER_BYTES = 256 << 10
"""Of a TCP connection within this host. (The kernel counts each byte of it double.) By itself the kernel lets some 4 MiB wait there: then both copies of each
byte, into the connection and out of it, go through memory that no cache of the core holds any more, and take twice to three times as long.
"""
NEAR_ADDRESSES = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")
COPY_BELOW_BYTES = 64 << 10
"""Smaller frames that come are copied: more than 8 KiB, so that larger ones begin at a multiple of 8, where Arrow wants columns."""
POLL_MAX_MS = 2**31 - 1
FINE_BELOW_NS = 20_000_000
"""Shorter sleeps are exact: `poll` counts milliseconds, and one too many is a fifth of the default linger_ms."""
SELECT_FDS_MAX = 1024
"""Descriptors from here on are none for select(2) (FD_SETSIZE)."""
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
"""As plain numbers: an operation on members of an enumeration is Python code."""


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Readable], *, copy: bool = True) -> None:
    """Queue one message, without waiting. A third of what `send_multipart` costs, which looks at each frame twice. Raises zmq.ZMQError."""
    send = socket.send
    for frame in frames[:-1]:
        send(frame, _NOBLOCK_MORE, copy)
    send(frames[-1], _NOBLOCK, copy)


class ClientSocket(Protocol):
    """One connection's socket. Nothing blocks."""

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        """Queue one message; False when the queue is full."""
        ...

    def try_receive(self) -> Sequence[Readable] | None:
        """One whole message, or None."""
        ...

    def fileno(self) -> int:
        """Readable when something may have come; -1: there is none."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class DealerSocket:
    """A ZeroMQ DEALER, connected."""

    def __init__(self, address: str) -> None:
        """Raises InvalidSettingError."""
        try:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, FRAME_MAX_BYTES)
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
            if address.startswith(NEAR_ADDRESSES):
                socket.setsockopt(zmq.SNDBUF, NEAR_SEND_BUFFER_BYTES)
            socket.connect(address)
            self._fd = int(socket.getsockopt(zmq.FD))
        except zmq.ZMQError as error:
            raise InvalidSettingError(f"bootstrap {address!r} is no address that ZeroMQ takes: {error.strerror}") from None
        self._socket = socket

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        """Queue one message; False when the queue is full."""
        try:
            send_frames(self._socket, frames, copy=copy)
        except zmq.Again:
            return False
        return True

    def try_receive(self) -> Sequence[Readable] | None:
        """One whole message, or None."""
        # Asking first costs a third of the exception that says that there is nothing, which is the answer more often than not.
        if not int(self._socket.get(_EVENTS)) & _POLLIN:
            return None
        frames: list[Readable] = []
        more = True
        while more:
            frame = self._socket.recv(_NOBLOCK, copy=False)  # it knows whether it is the last: asking the socket costs more
            # libzmq has memory of its own for a large frame, which is used as it is; small ones lie anywhere in what was received together.
            frames.append(frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer.toreadonly())
            more = frame.more
        return frames

    def fileno(self) -> int:
        """Readable when something *may* have come."""
        return self._fd

    def close(self) -> None:
        """End it; what is queued is not sent."""
        self._socket.close(0)


def sleep_on(fds: Sequence[int], timeout_ns: int) -> list[int]:
    """Until one of `fds` (those below 0 are none) is readable, or closed, or the time is up; long times are rounded up to milliseconds. Returns those that are
    readable. gevent makes both ways cooperative.
    """
    if 0 < timeout_ns < FINE_BELOW_NS and max(fds, default=-1) < SELECT_FDS_MAX:
        try:
            return select.select([fd for fd in fds if fd >= 0], (), (), timeout_ns / 1e9)[0]
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            return list(fds)
    poll = select.poll()
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(min(max(0, -(-timeout_ns // 1_000_000)), POLL_MAX_MS))]


@dataclass(frozen=True, slots=True, repr=False)
class Environment:
    """The world that a client lives in: see the module's docstring."""

    monotonic_ns: Callable[[], int]
    open_socket: Callable[[str], ClientSocket]
    sleep_on: Callable[[Sequence[int], int], Sequence[int] | None]
    """Returns the descriptors that are readable; None: perhaps all."""
    random: Callable[[], float]
    """Uniform in [0, 1)."""
    has_threads: bool = True

    def __repr__(self) -> str:
        return "REAL" if self is REAL else "<another Environment>"


REAL = Environment(time.monotonic_ns, DealerSocket, sleep_on, random.random)
