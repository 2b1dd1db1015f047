"""A ZeroMQ network in memory: one ROUTER per front, DEALERs that find it again, and what ZeroMQ
does to messages when a connection breaks.

Invariants: messages of a connection keep their order; a reconnected DEALER has another identity;
with a connection break some of what was under way is lost and the rest arrives (tried with the real
thing: 65 of 400 were lost). Half of the clients see the break, as those whose host is there do.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from netfront.socket.flow_control import Credit
from netfront.socket.transport import Watched
from shm.runtime.timing_wheel import NEVER_NS
from tailrace.format.crc32c import Readable


class Link:
    """One DEALER's connection: messages under way in both directions."""

    __slots__ = ("identity", "is_lost", "is_open", "to_client", "to_front")

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.to_front: deque[list[bytes]] = deque()
        self.to_client: deque[list[bytes]] = deque()
        self.is_open = True
        self.is_lost = False
        """The client has seen its end."""


class Network:
    """Every connection to the one front."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._count = 0
        self.links: dict[bytes, Link] = {}
        self._ended: list[bytes] = []
        """Identities of which nothing more will come, and which the front has not been told of."""

    def _new_identity(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(5, "big")

    def connect(self) -> Link:
        link = Link(self._new_identity())
        self.links[link.identity] = link
        return link

    def drop(self, link: Link) -> None:
        """The client has closed its socket; what it had sent may still arrive."""
        link.is_open = False
        if not link.to_front:
            self._end(link)

    def cut(self, link: Link) -> None:
        """The connection breaks and comes back under another identity; some of what was under way
        is gone.
        """
        for _ in range(self._rng.randint(0, len(link.to_front))):
            link.to_front.popleft()
        for _ in range(self._rng.randint(0, len(link.to_client))):
            link.to_client.pop()
        self._end(link)
        link.is_lost = self._rng.random() < 0.5
        if link.is_open and not link.is_lost:
            link.identity = self._new_identity()
            self.links[link.identity] = link

    def _end(self, link: Link) -> None:
        if self.links.pop(link.identity, None) is not None:
            self._ended.append(link.identity)

    def cut_all(self) -> None:
        for link in list(self.links.values()):
            self.cut(link)

    # ---- the front's side (netfront.socket.transport.Transport) ----------------------------------

    def has_input(self) -> bool:
        return any(link.to_front for link in self.links.values())

    def try_receive(self) -> list[bytes] | None:
        waiting = [link for link in self.links.values() if link.to_front]
        if not waiting:
            return None
        link = self._rng.choice(waiting)
        frames = link.to_front.popleft()
        if not link.is_open and not link.to_front:
            identity = link.identity
            self._end(link)
            return [identity, *frames]
        return [link.identity, *frames]

    def try_send(self, identity: bytes, frames: Sequence[Readable]) -> bool:
        link = self.links.get(identity)
        if link is None or not link.is_open:
            return False
        link.to_client.append([bytes(frame) for frame in frames])
        return True

    def try_send_buffer(
        self, identity: bytes, frames: Sequence[Readable], data: memoryview
    ) -> bool:
        return self.try_send(identity, [*frames, data])

    def new_buffer(self, size: int) -> bytearray:
        return bytearray(size)

    @property
    def watch_at_ns(self) -> int:
        return 0 if self._ended else NEVER_NS

    def watch(self, now_ns: int) -> Watched:
        del now_ns
        ended, self._ended = self._ended, []
        return Watched(ended, 0)

    def shaken(self, identity: bytes, credit: Credit | None) -> None:
        """Nobody is closed here for what it costs."""

    def claim(self, identity: bytes) -> None:
        """The simulated network checks nothing about its clients."""

    def peer_address(self, identity: bytes) -> str:
        del identity
        return ""

    def close_peer(self, identity: bytes, reason: str) -> None:
        del reason
        link = self.links.get(identity)
        if link is not None:
            self.cut(link)

    def unsent_bytes(self, identity: bytes) -> int:
        link = self.links.get(identity)
        return (
            0 if link is None else sum(len(frame) for frames in link.to_client for frame in frames)
        )

    def unsent_total(self) -> int:
        return sum(self.unsent_bytes(identity) for identity in self.links)


class SimSocket:
    """`tailrace.client.connections.runtime.ClientSocket` over a Link."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.link = network.connect()

    @property
    def is_lost(self) -> bool:
        return self.link.is_lost and not self.link.to_client

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        del copy
        if self.link.is_lost:
            return False
        self.link.to_front.append([bytes(frame) for frame in frames])
        return True

    def try_receive(self) -> list[bytes] | None:
        return self.link.to_client.popleft() if self.link.to_client else None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._network.drop(self.link)
