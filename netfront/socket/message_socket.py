"""Message socket: receives and sends the messages of a ROUTER, frame by frame.

pyzmq creates an object for each received frame and looks up each call in Python. That was a fifth
of the front's time for an ack. The compiled variant (`tailrace/kernel/native/sockets.pxi`) calls
the same libzmq by the addresses of its functions.

Owner: one front. Nothing blocks.

Invariants:
- A message is received whole, or `has_rest` is True.
- `taken` is the wire size of the frames behind the identity (ZMTP: flags, length, body).
- A large batch frame is a view of libzmq's message, which is closed when its last view is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from shm.memory.atomic_word import compiled_variant_of, new
from tailrace import kernel
from tailrace.client.connections.runtime import send_frames
from tailrace.format.crc32c import Readable
from tailrace.kernel import libzmq

LENT_FROM_BYTES = 32 << 10
"""Batch frames of at least this size are used in place. Copying is cheaper below it."""
FIRST_OF_BATCHES = 3
"""First frame that can hold batches: identity, header and batch entries come before it. Only
PRODUCE has it.
"""
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)


class MessageSocket:
    """Receives and sends on one socket, which its creator owns."""

    def __new__(cls, socket: zmq.Socket[bytes]) -> Any:
        """Return the compiled variant if libzmq's functions are found."""
        return new(cls, kernel.compiled is not None and libzmq.addresses() is not None)

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.taken = 0
        """Wire bytes of the message that `try_receive` returned last."""
        self.has_rest = False
        """True if that message has more frames, which the caller must receive."""
        self.is_drained = False
        """True if the socket was empty at its last use, which its users note. A new message then
        makes its descriptor readable.
        """

    def events(self) -> int:
        """Return zmq.EVENTS."""
        return int(self._socket.get(_EVENTS))

    def try_receive(self, known: dict[bytes, Any], parts_max: int) -> list[bytes] | None:
        """Return a message, identity first, or None if there is none.

        For an unknown identity only the identity is returned, else at most `parts_max` more frames.
        See `taken_frame`.
        """
        # Checking first costs a third of the exception that an empty socket raises.
        if not int(self._socket.get(_EVENTS)) & _POLLIN:
            return None
        receive = self._socket.recv
        # A frame knows whether it is the last. Asking the socket costs more.
        frame = receive(_NOBLOCK, False)
        frames = [frame.bytes]
        taken = 0
        if frames[0] in known:
            while frame.more and len(frames) <= parts_max:
                frame = receive(_NOBLOCK, False)
                part = taken_frame(frame, len(frames))
                taken += len(part) + (2 if len(part) < 256 else 9)
                frames.append(part)
        self.taken, self.has_rest = taken, frame.more
        return frames

    def send(self, frames: Sequence[Readable]) -> None:
        """Queue one message. The caller may reuse the frames. Raises zmq.ZMQError."""
        send_frames(self._socket, frames)

    def close(self) -> None:
        """Stop receiving and sending. Call it before the socket is closed."""


def taken_frame(frame: zmq.Frame, index: int) -> Any:
    """Return the content of frame `index` (the identity is 0) as bytes, or as a view if it is a
    large batch frame.
    """
    return (
        frame.buffer if index >= FIRST_OF_BATCHES and len(frame) >= LENT_FROM_BYTES else frame.bytes
    )


if kernel.compiled is not None:

    @compiled_variant_of(MessageSocket)
    class _CompiledMessageSocket(kernel.compiled.MessageSocket, MessageSocket):  # type: ignore[misc]
        def __init__(self, socket: zmq.Socket[bytes]) -> None:
            MessageSocket.__init__(self, socket)
            addresses = libzmq.addresses()
            assert addresses is not None
            self._begin(
                socket.underlying, addresses, zmq.ZMQError, FIRST_OF_BATCHES, LENT_FROM_BYTES
            )
