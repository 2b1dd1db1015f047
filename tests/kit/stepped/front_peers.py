"""The peers of a front without sockets: connections and what closes them, put together as the
router does, over numbers of the kernel that a test sets.
"""

from __future__ import annotations

from collections.abc import Callable

from netfront.socket.flow_control import Credit
from netfront.socket.peers.condemned_peers import CondemnedPeers
from netfront.socket.peers.connection_costs import ConnectionCosts
from netfront.socket.peers.connections import Connections, Limits
from netfront.socket.peers.peer_connection import PeerConnection
from netfront.socket.peers.unsent_responses import UnsentResponses

KIB = 1 << 10
MIB = 1 << 20
LIMITS = Limits(
    connections_max=10,
    unshaken_peer_max=MIB,
    unshaken_max=2 * MIB,
    untaken_max=8 * MIB,
    unsent_max=4 * MIB,
    memory_growth_max=100 * MIB,
)


class FakeSockets:
    """The kernel's side."""

    def __init__(self) -> None:
        self.received: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.closed: list[int] = []
        self.held: list[int] = []
        self.memory = 50 * MIB

    def inode(self, fd: int) -> int:
        return fd

    def received_bytes(self, fd: int) -> int:
        return self.received.get(fd, 0)

    def waiting_bytes(self, fd: int) -> int:
        return self.waiting.get(fd, 0)

    def shrink_local_send_buffer(self, fd: int) -> bool:
        self.held.append(fd)
        return True

    def shut(self, fd: int, inode: int) -> bool:
        self.closed.append(fd)
        return fd == inode

    def private_bytes(self) -> int:
        return self.memory

    def trim_memory(self) -> None:
        pass


class FakeMark:
    def __init__(self) -> None:
        self.done = False


class FrontPeers(Connections):
    """Connections with their costs. `b"gone"` is the only identity that is not connected."""

    def __init__(self, sockets: FakeSockets, limits: Limits = LIMITS) -> None:
        super().__init__(sockets, limits)
        self.unsent = UnsentResponses()
        self.condemned = CondemnedPeers(self)
        self.costs = ConnectionCosts(self, self.unsent, sockets)

    def sweep(self, now_ns: int, is_read: Callable[[], bool] = lambda: True) -> None:
        """As a sweep of the router."""
        self.condemned.sweep(lambda identity: identity != b"gone")
        self.costs.sweep(now_ns, is_read)

    @property
    def is_settled(self) -> bool:
        return self.costs.is_settled and not self.condemned


def connect(
    peers: FrontPeers, fd: int, now_ns: int = 0, *, shaken: bool = True, is_counted: bool = True
) -> PeerConnection:
    peers.accepted(fd, is_counted, now_ns)
    peer = peers.identify(b"%d" % fd, fd)
    assert peer is not None
    if shaken:
        peers.shaken(b"%d" % fd, Credit())
    return peer
