"""Transport protocol: the socket interface of a front.

It is implemented by `router.Router` over ZeroMQ, by `tests.sim.machine.network.Network`, and in
memory by the test kit. tests/netfront/socket/test_transport_conformance.py checks the real and the
simulated one against this interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from netfront.socket.flow_control import Credit
from tailrace.format.crc32c import Readable

if TYPE_CHECKING:
    from netfront.socket.zap import Claim


class Watched(NamedTuple):
    """Result of `Transport.watch`."""

    ended: list[bytes]
    """Identities from which no more messages come."""
    closed_count: int
    """Number of connections closed for exceeding a limit."""


class Transport(Protocol):
    """Connections by identity. No method blocks."""

    def try_receive(self) -> list[bytes] | None:
        """Return one whole message, identity first, or None if there is none.

        Messages of one connection come in order. The first three frames are `bytes`. Later frames,
        which only PRODUCE has, may be views of the message.
        """

    def try_send(self, identity: bytes, frames: Sequence[Readable]) -> bool:
        """Send a message after all earlier ones. The caller may reuse the frames.

        Return False if the client cannot be reached or its queue is full.
        """

    def try_send_buffer(
        self, identity: bytes, frames: Sequence[Readable], data: memoryview
    ) -> bool:
        """Send a message whose last frame is part of a buffer from `new_buffer`. The transport owns
        that buffer from then on.
        """

    def new_buffer(self, size: int) -> bytearray:
        """Return a buffer of at least `size` bytes with arbitrary content."""

    def unsent_bytes(self, identity: bytes) -> int:
        """Return about how many response bytes are still held for this client, 0 if unknown."""

    def unsent_total(self) -> int:
        """Return about how many response bytes are still held for all clients."""

    def shaken(self, identity: bytes, credit: Credit | None) -> None:
        """Record that a session was opened for `identity` with this credit, or dropped (None)."""

    def peer_address(self, identity: bytes) -> str:
        """Return the address that a connection comes from, for people. "": it is not known."""

    def close_peer(self, identity: bytes, reason: str) -> None:
        """Close the connection after its last messages have had time to leave.

        No effect on a closed one.
        """

    def claim(self, identity: bytes) -> Claim | None:
        """Return what ZeroMQ has checked about a client. None: nothing."""

    def watch(self, now_ns: int) -> Watched:
        """Update connections that have ended. Call it at `watch_at_ns`."""

    @property
    def watch_at_ns(self) -> int:
        """Time of the next `watch` call."""
