"""The runtime of a client: clock, sockets, sleep, randomness, and whether it may use threads.

Tests inject another runtime. `SYSTEM` uses ZeroMQ and the monotonic clock. A ClientSocket is one
non-blocking DEALER socket that sends and receives frames.
"""

from __future__ import annotations

import errno
import os
import random
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from tailrace import kernel
from tailrace.core.errors import InvalidSettingError
from tailrace.format.crc32c import Readable
from tailrace.kernel import libzmq
from tailrace.protocol.frame import BATCH_CEILING_BYTES

if TYPE_CHECKING:
    from tailrace.client.connections.credentials import Credentials

FRAME_MAX_BYTES = 2 * BATCH_CEILING_BYTES
"""Largest frame from an appliance: a fetch response and one batch more. ZeroMQ drops a larger frame
before reading it.
"""
RECONNECT_MS = 20
RECONNECT_MAX_MS = 60
"""Limits of the reconnect interval. A client started before the appliance connects within 100 ms of
its start. libzmq adds up to RECONNECT_MS at random.
"""
NEAR_SEND_BUFFER_BYTES = 256 << 10
"""Send buffer of a TCP connection within this host; the kernel counts each byte double. The
kernel's default of some 4 MiB exceeds the core's caches, and copies then take two to three times as
long.
"""
NEAR_ADDRESSES = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")
COPY_BELOW_BYTES = 64 << 10
"""Received frames below this size are copied. It is above 8 KiB, where libzmq gives a frame its own
memory: larger frames begin at a multiple of 8, as Arrow needs.
"""
PARTS_MAX = 2**31 - 1
"""Frames of a message: as many as there are."""
POLL_MAX_MS = 2**31 - 1
NEVER_NS = 2**62
"""A time of the monotonic clock that does not come."""
FINE_BELOW_NS = 20_000_000
"""Sleeps below this use select(2), which is exact. poll(2) counts milliseconds, and one too many is
a fifth of the default linger_ms.
"""
SELECT_FDS_MAX = 1024
"""The first descriptor that select(2) cannot take (FD_SETSIZE)."""
_EVENTS, _POLLIN, _POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain ints: operators of an enumeration's members run Python code."""


PORT_MAX = 65_535
PORT_DIGITS = 5


def check_bootstrap(address: object) -> str:
    """The address as ZeroMQ takes it. Kafka's `host:port` and a list of one address are accepted
    too. Raises InvalidSettingError.
    """
    if isinstance(address, str) and "," in address:
        address = [part.strip() for part in address.split(",") if part.strip()]
    if isinstance(address, (list, tuple)):
        if len(address) > 1:
            raise InvalidSettingError(
                f"bootstrap_servers names {len(address)} addresses; an appliance is one host: "
                "give one"
            )
        address = address[0] if address else ""
    if isinstance(address, str):
        if address.startswith(("ipc://", "context:")):
            return address
        is_tcp = address.startswith("tcp://")
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        can_be = (
            bool(host)
            and host.count(":") != 1  # `localhost:1:2`; an IPv6 address has two or more
            and (not port.isdecimal() or (len(port) <= PORT_DIGITS and int(port) <= PORT_MAX))
        )
        if is_tcp and (can_be or not port.isdecimal()):
            return address  # ZeroMQ checks the rest
        if can_be and port.isdecimal() and "/" not in address:
            return f"tcp://{address}"
    raise InvalidSettingError(
        f"bootstrap_servers is {address!r}; it takes an address such as tcp://127.0.0.1:7420, "
        "localhost:7420, ipc:///run/tailrace/tailrace.sock or "
        f"{_as_context(address)}"
    )


def send_frames(
    socket: zmq.Socket[bytes], frames: Sequence[Readable], *, copy: bool = True
) -> None:
    """Queue one message without waiting. Raises zmq.ZMQError.

    It costs a third of `send_multipart`, which checks each frame twice.
    """
    send = socket.send
    for frame in frames[:-1]:
        send(frame, _NOBLOCK_MORE, copy)
    send(frames[-1], _NOBLOCK, copy)


class ClientSocket(Protocol):
    """A connection's non-blocking socket."""

    @property
    def is_lost(self) -> bool:
        """True once its connection has ended and all that came over it was received."""
        ...

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        """Queue one message; False when the queue is full or the connection has ended."""
        ...

    def try_receive(self) -> Sequence[Readable] | None:
        """One whole message, or None."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable when something may have come; -1 if there is none."""
        ...

    def close(self) -> None:
        """Close the socket."""
        ...


class DealerSocket:
    """A ZeroMQ DEALER socket that knows whether its connection has ended.

    With ZMQ_IMMEDIATE libzmq removes the queue of a connection that has ended. The descriptor
    becomes readable, and the socket is not writable (ZMQ_POLLOUT) until libzmq has connected again.
    The first message waits here until there is a connection.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """Connect to `address`, encrypted if there are `credentials`. Raises
        InvalidSettingError.
        """
        try:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, FRAME_MAX_BYTES)
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
            if address.startswith(NEAR_ADDRESSES):
                socket.setsockopt(zmq.SNDBUF, NEAR_SEND_BUFFER_BYTES)
            if credentials is not None:
                from tailrace.client.connections.handshake_probe import set_credentials

                set_credentials(socket, credentials)
            socket.connect(address)
            self._fd = int(socket.getsockopt(zmq.FD))
        except zmq.ZMQError as error:
            raise InvalidSettingError(
                f"bootstrap {address!r} is not a valid ZeroMQ address: {error.strerror}; write "
                "tcp://HOST:PORT or ipc://PATH"
            ) from None
        self._socket = socket
        self._first: Sequence[Readable] | None = None
        """The first message, until there is a connection."""
        self._was_connected = False
        self.is_lost = False
        self._messages = _compiled_messages(socket)
        self._is_closed = False  # last: a socket whose making a signal has ended is not closed here

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        """Queue one message; False when the queue is full or the connection has ended."""
        if self._first is not None:
            return False
        try:
            # closed: the program has destroyed the context of all sockets
            if copy and self._messages is not None and not self._socket.closed:
                self._messages.send(frames)
            else:
                send_frames(self._socket, frames, copy=copy)
        except zmq.ZMQError as error:
            if error.errno != zmq.EAGAIN:
                raise
            if self._was_connected:
                return False
            self._first = frames
        return True

    def try_receive(self) -> Sequence[Readable] | None:
        """One whole message, or None."""
        # Asking first costs a third of the exception for an empty queue, the most frequent case.
        messages = None if self._socket.closed else self._messages
        events = int(self._socket.get(_EVENTS)) if messages is None else messages.events()
        if not events & _POLLIN:
            self._note_writable(bool(events & _POLLOUT))
            return None
        if messages is not None:
            received: list[Readable] | None = messages.try_receive(None, PARTS_MAX)
            return received
        frames: list[Readable] = []
        more = True
        while more:
            # frame.more is cheaper than asking the socket for RCVMORE.
            frame = self._socket.recv(_NOBLOCK, copy=False)
            # libzmq gives a large frame its own memory, which is used without a copy. Small frames
            # lie unaligned in a shared receive buffer.
            frames.append(
                frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer.toreadonly()
            )
            more = frame.more
        return frames

    def _note_writable(self, is_writable: bool) -> None:
        """Note the begin and end of the connection. Its queue is never full (SNDHWM 0)."""
        if is_writable:
            self._was_connected = True
            first, self._first = self._first, None
            if first is not None:
                self.try_send(first)
        elif self._was_connected:
            self.is_lost = True

    def fileno(self) -> int:
        """A descriptor that is readable when something may have come."""
        return self._fd

    def close(self) -> None:
        """Close the socket; queued messages are not sent. While another thread or greenlet sleeps
        on its descriptor, it stays open: gevent ends a process that waits for a closed one.
        """
        self._is_closed = True
        if self._messages is not None:
            self._messages.close()
        if any(self._fd in fds for fds in list(_sleeping.values())):
            _closing.append((self._fd, self._socket))
        else:
            self._socket.close(0)

    def __del__(self) -> None:
        """Close a socket that a signal handler's exception kept its owner from having."""
        if not getattr(self, "_is_closed", True):
            self.close()


def _compiled_messages(socket: zmq.Socket[bytes]) -> Any:
    """The socket's messages by the kernel, None where pyzmq has to do.

    The kernel keeps the interpreter's lock, as nothing here waits. pyzmq gives it away for each
    frame. Where many threads have a producer each, that woke another thread for each frame.
    """
    if kernel.compiled is None or (functions := libzmq.addresses()) is None:
        return None
    messages = kernel.compiled.MessageSocket()
    messages._begin(socket.underlying, functions, zmq.ZMQError, 0, COPY_BELOW_BYTES)
    return messages


_sleeping: dict[object, Sequence[int]] = {}
"""The descriptors of each sleep that lasts."""
_closing: list[tuple[int, zmq.Socket[bytes]]] = []
"""Closed sockets with their descriptors, which someone still sleeps on."""
os.register_at_fork(after_in_child=_sleeping.clear)


def _close_unused() -> None:
    for item in list(_closing):
        if not any(item[0] in fds for fds in list(_sleeping.values())):
            try:
                _closing.remove(item)
            except ValueError:
                continue  # another thread closes it
            item[1].close(0)


def sleep_on(fds: Sequence[int], timeout_ns: int) -> list[int]:
    """Wait until one of `fds` is readable or closed, or the timeout has passed.

    Descriptors below 0 are skipped. Long timeouts are rounded up to milliseconds. Returns the
    readable descriptors. gevent makes both calls cooperative.
    """
    sleep = object()
    try:
        _sleeping[sleep] = fds
        return _sleep_on(fds, timeout_ns)
    finally:
        _sleeping.pop(sleep, None)
        if _closing:
            _close_unused()


def _sleep_on(fds: Sequence[int], timeout_ns: int) -> list[int]:
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
class Runtime:
    """The clock, sockets, sleep and randomness that a client uses."""

    monotonic_ns: Callable[[], int]
    open_socket: Callable[..., ClientSocket]
    """Takes an address, and the credentials of a connection that has some."""
    sleep_on: Callable[[Sequence[int], int], Sequence[int] | None]
    """Returns the readable descriptors, or None if any may be readable."""
    random: Callable[[], float]
    """Uniform in [0, 1)."""
    has_threads: bool = True
    has_probes: bool = False
    """True if a connection that is not made may find out why, over ZeroMQ."""

    def __repr__(self) -> str:
        return "SYSTEM" if self is SYSTEM else "<another Runtime>"


SYSTEM = Runtime(time.monotonic_ns, DealerSocket, sleep_on, random.Random().random, has_probes=True)


def _as_context(address: object) -> str:
    is_file = isinstance(address, str) and address.endswith(".context")
    return f"context:{address}" if is_file else "context:FILE"
