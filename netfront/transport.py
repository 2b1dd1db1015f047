"""What a front needs of its socket: `router.Router` over ZeroMQ, `tests.sim.network.Network` and the kit's in memory.

tests/netfront/test_transport_conformance.py holds the real one and the simulated one against this page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from netfront.credits import Credit
from tailrace.formats.checksum import Readable


class Watched(NamedTuple):
    """What `Transport.watch` saw."""

    ended: list[bytes]
    """Identities of which nothing more will come."""
    closed_count: int
    """Connections that were closed for what they cost."""


class Transport(Protocol):
    """Connections by their identity. Nothing here blocks."""

    def try_receive(self) -> list[bytes] | None:
        """One whole message, identity first, or None: there is none now. Messages of one connection come in order. The first three frames are `bytes`, those
        behind them, which only PRODUCE has, may be views of the message.
        """

    def try_send(self, identity: bytes, frames: Sequence[Readable]) -> bool:
        """Send a message after all before it; False: the client cannot be reached, or takes nothing. The frames are the caller's again."""

    def try_send_buffer(self, identity: bytes, frames: Sequence[Readable], data: memoryview) -> bool:
        """The same, its last frame part of a buffer from `new_buffer`, which is the transport's from then on."""

    def new_buffer(self, size: int) -> bytearray:
        """A buffer of at least `size` bytes, with whatever was in it."""

    def unsent_bytes(self, identity: bytes) -> int:
        """What is still held of answers to this client, about; 0 where nothing is known of it."""

    def unsent_total(self) -> int:
        """The same for all clients together."""

    def shaken(self, identity: bytes, credit: Credit | None) -> None:
        """A session was opened for `identity`, with this credit; or dropped (None)."""

    def close_peer(self, identity: bytes, reason: str) -> None:
        """End the connection as soon as what it was sent has had time to leave. Of one that is gone: nothing."""

    def watch(self, now_ns: int) -> Watched:
        """Take in which connections have ended; called when `watch_at_ns` has come."""

    @property
    def watch_at_ns(self) -> int:
        """When to call `watch` next."""
