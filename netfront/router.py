"""The ZeroMQ socket of a front, behind four methods, so that the front itself can be stepped without one.

ROUTER with ROUTER_MANDATORY: a message to a client that is gone, or whose queue is full, is refused here instead of dropped in silence.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

import zmq

from tailrace.checksum import Readable
from tailrace.protocol.wire import BATCH_CEILING_BYTES

QUEUE_MESSAGES = 4096
BUFFER_CLASSES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)
POOLED_MAX = 8
COPY_BELOW_BYTES = 32 << 10
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
"""As plain numbers: an operation on members of an enumeration is Python code."""


class AddressInUseError(RuntimeError):
    """Something else listens there."""


class Router:
    """A bound socket and the buffers that are being sent from."""

    def __init__(self, addresses: list[str]) -> None:
        """Bind to all `addresses`. Raises AddressInUseError."""
        self._context = zmq.Context()
        socket = self.socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, BATCH_CEILING_BYTES + (1 << 20))
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
        self.port = 0
        self._socket_paths = [address.removeprefix("ipc://") for address in addresses if address.startswith("ipc:///")]
        for address in addresses:
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                raise AddressInUseError(
                    f"cannot listen on {address}: {error.strerror}. Stop what uses it, or choose another with --listen."
                ) from None
            if address.startswith("tcp://") and not self.port:
                bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
                self.port = int(bound.rpartition(":")[2].rstrip("\0"))
        self._free: dict[int, list[bytearray]] = {size: [] for size in BUFFER_CLASSES}
        self._sending: deque[tuple[zmq.MessageTracker, bytearray]] = deque()

    def try_receive(self) -> list[bytes] | None:
        """One whole message, identity first, or None."""
        # Asking first costs a third of the exception that says that there is nothing.
        return self.socket.recv_multipart(zmq.NOBLOCK) if self.has_input() else None

    def has_input(self) -> bool:
        """Whether a message waits. Sending may have noticed it, so the descriptor alone does not tell."""
        return bool(int(self.socket.get(_EVENTS)) & _POLLIN)

    def try_send(self, identity: bytes, frames: Sequence[Readable]) -> bool:
        """Queue a message; False when the client is gone or takes nothing."""
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def try_send_buffer(self, identity: bytes, frames: Sequence[Readable], data: memoryview) -> bool:
        """Queue a message whose last frame is part of a buffer from `new_buffer`; the buffer is used again when it is sent."""
        buffer = data.obj
        assert isinstance(buffer, bytearray)
        if len(data) < COPY_BELOW_BYTES:
            sent = self.try_send(identity, [*frames, data])
            self._give_back(buffer)
            return sent
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK | zmq.SNDMORE)
            tracker = self.socket.send(data, zmq.NOBLOCK, copy=False, track=True)
        except (zmq.Again, zmq.ZMQError):
            return False
        assert tracker is not None
        self._sending.append((tracker, buffer))
        return True

    def new_buffer(self, size: int) -> bytearray:
        """A buffer of at least `size` bytes, with whatever was in it."""
        while self._sending and self._sending[0][0].done:
            self._give_back(self._sending.popleft()[1])
        for class_size in BUFFER_CLASSES:
            if size <= class_size:
                free = self._free[class_size]
                return free.pop() if free else bytearray(class_size)
        return bytearray(size)

    def unsent_bytes(self, identity: bytes) -> int:
        """How many bytes of answers ZeroMQ still holds for this client."""
        return 0

    def unsent_total(self) -> int:
        """The same, for all clients."""
        return 0

    def _give_back(self, buffer: bytearray) -> None:
        free = self._free.get(len(buffer))
        if free is not None and len(free) < POOLED_MAX:
            free.append(buffer)

    def close(self) -> None:
        """Send what is queued for at most a second, then end; Unix sockets go from the file system."""
        self.socket.close()
        self._context.term()
        for path in self._socket_paths:
            if os.path.exists(path):
                os.unlink(path)
