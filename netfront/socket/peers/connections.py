"""Connections of a front: each one's beginning and end, its identity and its credit.

libzmq has no names for connections. Its monitor reports the descriptor of one that begins or ends,
and each first message of an identity comes with the descriptor of its sender. A descriptor is used
again by later connections.

Owner: one front.

Invariants:
- connections <= connections_max.
- A connection has one identity at a time, and an identity one connection.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from typing import NamedTuple

from netfront.socket.flow_control import Credit
from netfront.socket.peers.peer_connection import PeerConnection
from netfront.socket.peers.socket_stats import SocketStats

logger = logging.getLogger(__name__)

ROOM_NS = 1_000_000_000
"""Time a connection may stay without a handshake when others find no room."""
SWEEP_INTERVAL_NS = 50_000_000


class Limits(NamedTuple):
    """Limits of all connections of a front together."""

    connections_max: int
    unshaken_peer_max: int
    """Untaken bytes of one peer before its handshake. A client of a killed front still has batches
    in flight when it connects to the successor.
    """
    unshaken_max: int
    """Sum over all peers without a handshake."""
    untaken_max: int
    unsent_max: int
    memory_growth_max: int
    """Growth of private memory since the front began to listen."""


class Connections:
    """All connections of a front."""

    def __init__(self, sockets: SocketStats, limits: Limits) -> None:
        self._sockets = sockets
        self.limits = limits
        self.by_fd: dict[int, PeerConnection] = {}
        self.by_identity: dict[bytes, PeerConnection] = {}
        self.unshaken: OrderedDict[PeerConnection, None] = OrderedDict()
        """Connections without a handshake, oldest first."""
        self._unread: deque[tuple[PeerConnection, int, int]] = deque()
        """Closed connections whose last messages may still be unread."""
        self._displaced: list[bytes] = []
        """Identities whose descriptor now belongs to another connection."""
        self._credits: dict[bytes, Credit] = {}
        """Credits of identities with a handshake."""
        self.untaken_total = 0
        self.closed_count = 0
        """Number of connections closed for exceeding a limit."""
        self._connections_max = limits.connections_max
        self._is_full = False

    def __len__(self) -> int:
        return len(self.by_fd)

    # ---- beginning and end -----------------------------------------------------------------------

    def accepted(self, fd: int, is_counted: bool, now_ns: int) -> None:
        """Add a connection. Above the limit close one: the oldest without a handshake if it is
        older than ROOM_NS, else the new one.
        """
        peer = self.by_fd[fd] = PeerConnection(fd, self._sockets.inode(fd), is_counted, now_ns)
        self.unshaken[peer] = None
        if is_counted:
            self._sockets.shrink_local_send_buffer(fd)
        if len(self.by_fd) <= self._connections_max:
            return
        if not self._is_full and self._connections_max == self.limits.connections_max:
            self._is_full = True
            logger.warning(
                "connections_full count=%d",
                len(self.by_fd) - 1,
            )
        oldest = next(iter(self.unshaken))
        self._shut(oldest if now_ns - oldest.accepted_ns >= ROOM_NS else peer)

    def came_and_went(self, fd: int, now_ns: int, empty_count: int, *, is_counted: bool) -> None:
        """Record a connection that had ended when it became known. Its messages may still be
        unread; its descriptor may be another connection's by now.
        """
        peer = PeerConnection(fd, 0, is_counted, now_ns)
        peer.is_closing = True
        self._unread.append((peer, now_ns, empty_count))

    def set_limits(self, limits: Limits) -> None:
        """Change the limits. Connections above a smaller number stay until they end."""
        self.limits = limits
        self._connections_max = limits.connections_max

    def make_room(self, count: int) -> None:
        """Close `count` connections without a handshake because no descriptor is free. Keep the
        limit at what remains until `on_room_available`.
        """
        self._connections_max = max(0, min(self._connections_max, len(self.by_fd) - count))
        for peer in list(self.unshaken)[:count]:
            self._shut(peer)

    def on_room_available(self) -> None:
        """Restore the configured limit of connections: descriptors are free again."""
        self._connections_max = self.limits.connections_max

    def disconnected(self, fd: int, now_ns: int, empty_count: int) -> None:
        """Record the end of a connection. `empty_count` is the number of times the socket was read
        empty so far.
        """
        peer = self.by_fd.pop(fd, None)
        if peer is None:
            return
        self.unshaken.pop(peer, None)
        self.untaken_total -= peer.untaken
        peer.untaken = 0
        peer.is_closing = True
        self._unread.append((peer, now_ns, empty_count))
        if self._is_full and len(self.by_fd) < self.limits.connections_max * 15 // 16:
            self._is_full = False
            logger.info("connections_have_room count=%d", len(self.by_fd))

    def identify(self, identity: bytes, fd: int) -> PeerConnection | None:
        """Bind `identity` to the connection of `fd` and return it, or None if `fd` is unknown.

        It is called for the first message of an identity, and again after another identity replaced
        it. A descriptor is reused by later connections, and libzmq reads connections in turn. A
        closed connection's last message may therefore come after its successor's first. An identity
        displaced here may still be alive. Its next message restores it.
        """
        peer = self.by_fd.get(fd)
        if peer is None or peer.identity is not None:
            ended = [ended for ended, _, _ in self._unread if ended.fd == fd]
            peer = (
                next((ended for ended in ended if ended.identity is None), None)
                or peer
                or next(iter(ended), None)
            )
        if peer is None:
            return None
        if peer.identity is not None:
            self.by_identity.pop(peer.identity, None)
            self._displaced.append(peer.identity)
        peer.identity = identity
        self.by_identity[identity] = peer
        self._note_credit(peer)
        return peer

    def unbind(self, peer: PeerConnection) -> None:
        """Take its identity from a connection: another one has it."""
        if peer.identity is not None:
            self.by_identity.pop(peer.identity, None)
        if self.is_open(peer):
            peer.identity = None  # an ended one without an identity would get the next one's

    def has_successor(self, peer: PeerConnection) -> bool:
        """True if a later connection has its descriptor."""
        return self.by_fd.get(peer.fd, peer) is not peer

    def is_open(self, peer: PeerConnection) -> bool:
        """True while no end of the connection was reported."""
        return self.by_fd.get(peer.fd) is peer

    def shaken(self, identity: bytes, credit: Credit | None) -> None:
        """Record the handshake of `identity` with its credit, or the end of its session (None)."""
        if credit is None:
            self._credits.pop(identity, None)
        else:
            self._credits[identity] = credit
        peer = self.by_identity.get(identity)
        if peer is not None:
            self._note_credit(peer)

    def _note_credit(self, peer: PeerConnection) -> None:
        peer.credit = self._credits.get(peer.identity) if peer.identity is not None else None
        if peer.credit is not None:
            self.unshaken.pop(peer, None)
        elif not peer.is_closing:
            self.unshaken[peer] = None

    def drain_ended(self, now_ns: int, empty_count: int) -> list[bytes]:
        """Return identities whose connection has closed and whose last messages were read.

        An identity that lost its descriptor to another one may be among them although it is alive
        (see `identify`).
        """
        ended, self._displaced = self._displaced, []
        while self._unread:
            peer, since_ns, empty_then = self._unread[0]
            # libzmq reports the end shortly before it delivers the last messages.
            if empty_count <= empty_then or now_ns - since_ns < SWEEP_INTERVAL_NS // 5:
                break
            self._unread.popleft()
            if peer.identity is not None and self.by_identity.get(peer.identity) is peer:
                del self.by_identity[peer.identity]
                ended.append(peer.identity)
        return ended

    @property
    def has_ended(self) -> bool:
        """True if `drain_ended` may have something to return."""
        return bool(self._unread or self._displaced)

    def unread_descriptors(self) -> set[int]:
        """The descriptors of ended connections whose last messages may still be unread."""
        return {ended.fd for ended, _, _ in self._unread}

    def is_sender(self, peer: PeerConnection) -> bool:
        """True if `peer` certainly sent its last message. False while a closed connection with the
        same descriptor may still deliver messages (see `identify`).
        """
        return all(
            ended.fd != peer.fd or ended.identity is not None for ended, _, _ in self._unread
        )

    def close(self, peer: PeerConnection, reason: str) -> None:
        """Close a connection that exceeds a limit."""
        if peer.is_closing:
            return
        self.closed_count += 1
        logger.warning(
            "peer_closed reason=%r shaken=%s untaken_bytes=%d unsent_bytes=%d",
            reason, peer.credit is not None, peer.untaken, peer.unsent,
        )  # fmt: skip
        self._shut(peer)

    def _shut(self, peer: PeerConnection) -> None:
        peer.is_closing = True
        self.unshaken.pop(peer, None)
        self._sockets.shut(peer.fd, peer.inode)
