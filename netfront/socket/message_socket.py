"""A ROUTER's messages, frame by frame, and the ones that it sends.

pyzmq makes an object for each frame that comes, and looks up each call in Python: of an acknowledgement, in cold caches, a fifth of what the front runs. The
compiled twin (`tailrace/kernel/_sockets.pxi`) calls the same libzmq, the one that pyzmq has loaded, by the addresses of its functions.

Owner: one front. Nothing blocks. Invariants: a message is received whole, or `has_rest` says that it is not; `taken` is what its frames behind the identity
took on the wire (ZMTP: flags, length, body). A large frame of batches is lent: libzmq's message is closed when its last view is gone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import zmq

from shm.cell import is_twin_of, new
from tailrace import kernel
from tailrace.environment import send_frames
from tailrace.formats.checksum import Readable

FUNCTIONS = ("zmq_msg_init", "zmq_msg_close", "zmq_msg_more", "zmq_msg_recv", "zmq_msg_data", "zmq_msg_size", "zmq_send", "zmq_errno")
LENT_FROM_BYTES = 32 << 10
"""A frame of batches of this size is used where libzmq has received it; a smaller one is copied sooner than kept."""
FIRST_OF_BATCHES = 3
"""Behind identity, header and what the request says of its batches; no other request has a frame there."""
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)


class MessageSocket:
    """Of one socket, which stays its maker's."""

    def __new__(cls, socket: zmq.Socket[bytes]) -> Any:
        """One whose calls are compiled, where libzmq's functions are found."""
        return new(cls, kernel.compiled is not None and _addresses() is not None)

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.taken = 0
        """Bytes on the wire of what `try_receive` has returned last."""
        self.has_rest = False
        """Whether its message has more frames, to be received by others."""

    def try_receive(self, known: dict[bytes, Any], parts_max: int) -> list[bytes] | None:
        """A message, identity first; None: there is none. Of one whose identity is not `known` the identity alone, else at most `parts_max` frames
        more. See `taken_frame`.
        """
        # Asking first costs a third of the exception that says that there is nothing.
        if not int(self._socket.get(_EVENTS)) & _POLLIN:
            return None
        receive = self._socket.recv
        frame = receive(_NOBLOCK, False)  # a frame knows whether it is the last: asking the socket costs more
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
        """Queue one message; the frames are the caller's again. Raises zmq.ZMQError."""
        send_frames(self._socket, frames)

    def close(self) -> None:
        """Before the socket is closed: nothing more is received or sent."""


def taken_frame(frame: zmq.Frame, index: int) -> Any:
    """What a message's frame number `index`, the identity's being 0, holds: bytes, or a view of it where it is large and holds batches."""
    return frame.buffer if index >= FIRST_OF_BATCHES and len(frame) >= LENT_FROM_BYTES else frame.bytes


def _addresses() -> tuple[int, ...] | None:
    """Of FUNCTIONS in the libzmq that pyzmq calls; None: it has none that can be found so (a backend other than its own)."""
    try:
        # What its module was linked with is searched too; this loads nothing new.
        loaded = ctypes.CDLL(zmq.backend.cython._zmq.__file__)  # type: ignore[attr-defined]
        return tuple(ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS)
    except (AttributeError, OSError):
        return None


if kernel.compiled is not None:

    @is_twin_of(MessageSocket)
    class _CompiledMessageSocket(kernel.compiled.MessageSocket, MessageSocket):  # type: ignore[misc]
        def __init__(self, socket: zmq.Socket[bytes]) -> None:
            MessageSocket.__init__(self, socket)
            addresses = _addresses()
            assert addresses is not None
            self._begin(socket.underlying, addresses, zmq.ZMQError, FIRST_OF_BATCHES, LENT_FROM_BYTES)
