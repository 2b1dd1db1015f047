"""One connection of a front, with the counters of its untaken and unsent bytes (see `connections`).

Owner: one front; `Connections` and `Router` change it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from netfront.socket.flow_control import Credit

if TYPE_CHECKING:
    from netfront.socket.zap import Claim


class Mark(Protocol):
    """Tracker of a sent message: done when libzmq has released it (see `zmq.MessageTracker`)."""

    @property
    def done(self) -> bool: ...


class PeerConnection:
    """One connection."""

    __slots__ = (
        "accepted_ns",
        "buffers",
        "claim",
        "credit",
        "fd",
        "identity",
        "inode",
        "is_closing",
        "is_counted",
        "marked",
        "marks",
        "progress_ns",
        "released",
        "sent",
        "swept_ns",
        "swept_taken",
        "taken",
        "untaken",
        "user_id",
    )  # fmt: skip

    def __init__(self, fd: int, inode: int, is_counted: bool, now_ns: int) -> None:
        self.fd = fd
        self.inode = inode
        self.is_counted = is_counted
        """True if the kernel counts its bytes."""
        self.accepted_ns = self.swept_ns = self.progress_ns = now_ns
        self.identity: bytes | None = None
        self.claim: Claim | None = None
        """Facts about its client that ZeroMQ has checked, where it checks."""
        self.user_id = ""
        """The claim as ZeroMQ has it with each message."""
        self.credit: Credit | None = None
        """Set at the handshake."""
        self.is_closing = False
        self.taken = 0
        """Wire bytes of the whole messages received."""
        self.swept_taken = 0
        self.untaken = 0
        self.sent = self.marked = self.released = 0
        """Cost of its responses: up to the last one, up to the last with a mark, and up to the last
        mark that libzmq released.
        """
        self.marks: deque[tuple[int, Mark, bytearray | None]] = deque()

    @property
    def unsent(self) -> int:
        """Bytes of responses up to the last mark.

        Those after it are less than MARK_BYTES, or new.
        """
        return self.marked - self.released
