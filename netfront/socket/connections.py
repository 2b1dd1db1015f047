"""Connections of a front and their cost: unfinished messages and unread responses in libzmq.

libzmq buffers the parts of a message until the last has arrived, and no option bounds their number.
So the kernel's count of a connection's bytes is compared with the bytes of whole messages received.
The difference, less what the kernel still holds, is *untaken*. Responses are counted when sent and
counted off when libzmq releases a marked message. The difference is *unsent*. A peer beyond its
allowance is closed. A well-behaved client never meets these limits.

Every 50 ms `sweep` checks some connections in turn, and all of them when memory is short. Idle ones
cannot be skipped: libzmq's thread may read bytes before an epoll on its descriptors reports them,
so only a check detects an endless message. While that thread does nothing at all no sweep is due
(see `sweep_pause`).

Owner: one front.

Invariants, up to the growth between two sweeps:
- untaken <= unshaken_peer_max for a peer before its handshake.
- The sum of those <= unshaken_max.
- untaken <= granted bytes not yet received + SESSION_SLACK_BYTES after it.
- The sum over all peers <= untaken_max.
- unsent <= UNSENT_PEER_MAX for each peer, and the sum <= unsent_max.
- connections <= connections_max.
- This process's private memory <= memory_max, as long as a peer can be closed.

Connections without a byte count (Unix sockets) are bounded by the memory rule alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from netfront.socket.flow_control import Credit
from netfront.socket.peer_connection import Mark, PeerConnection
from netfront.socket.socket_stats import SocketStats
from tailrace.protocol.frame import JSON_MAX_BYTES

logger = logging.getLogger(__name__)

SESSION_SLACK_BYTES = JSON_MAX_BYTES + (1 << 20) + (64 << 10)
"""Bytes beside batches: one JSON request, and many small requests that are not read yet."""
KEEPALIVE_BYTES_PER_S = 16
"""Allowance for ZMTP commands, which are received bytes but never messages."""
UNSENT_PEER_MAX = 48 << 20
"""The fetch window (32 MiB) and one more response."""
MARK_BYTES = 64 << 10
"""Bytes of small responses after which one is sent with a tracker."""
MESSAGE_COST_BYTES = 200
"""Memory cost of a message beside its bytes."""
STALLED_NS = 30_000_000_000
UNSHAKEN_NS = 10_000_000_000
SWEEP_INTERVAL_NS = 50_000_000
SWEEP_PEERS = 256
ROOM_NS = 1_000_000_000
"""Time a connection may stay without a handshake when others find no room."""
SILENT_NS = 1_000_000_000
SUSPECT_BYTES = 4 << 10


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
        self._by_fd: dict[int, PeerConnection] = {}
        self.by_identity: dict[bytes, PeerConnection] = {}
        self._unshaken: OrderedDict[PeerConnection, None] = OrderedDict()
        """Connections without a handshake, oldest first."""
        self._unread: deque[tuple[PeerConnection, int, int]] = deque()
        """Closed connections whose last messages may still be unread."""
        self._displaced: list[bytes] = []
        """Identities whose descriptor now belongs to another connection."""
        self._credits: dict[bytes, Credit] = {}
        """Credits of identities with a handshake."""
        self._condemned: dict[PeerConnection, str] = {}
        """Peers to close at the sweep after the next, with the reason."""
        self._doomed: dict[PeerConnection, str] = {}
        """Peers to close at the next sweep, with the reason."""
        self._suspects: dict[bytes, tuple[int, str]] = {}
        """Senders to close once it is known which connection of their descriptor they have: the
        descriptor and the reason.
        """
        self._round: list[PeerConnection] = []
        self._sending: deque[PeerConnection] = deque()
        """Peers that had unreleased marks at their last check."""
        self.untaken_total = 0
        self.unsent_total = 0
        self.closed_count = 0
        """Number of connections closed for exceeding a limit."""
        self._memory_at_start = sockets.private_bytes()
        self._memory_max = self._memory_at_start + limits.memory_growth_max
        self._connections_max = limits.connections_max
        self._is_full = False
        self._memory_is_short = False

    def __len__(self) -> int:
        return len(self._by_fd)

    # ---- beginning and end -----------------------------------------------------------------------

    def accepted(self, fd: int, is_counted: bool, now_ns: int) -> None:
        """Add a connection. Above the limit close one: the oldest without a handshake if it is
        older than ROOM_NS, else the new one.
        """
        peer = self._by_fd[fd] = PeerConnection(fd, self._sockets.inode(fd), is_counted, now_ns)
        self._unshaken[peer] = None
        if is_counted:
            self._sockets.shrink_local_send_buffer(fd)
        if len(self._by_fd) <= self._connections_max:
            return
        if not self._is_full and self._connections_max == self.limits.connections_max:
            self._is_full = True
            logger.warning(
                "connections_full count=%d",
                len(self._by_fd) - 1,
            )
        oldest = next(iter(self._unshaken))
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
        self._memory_max = self._memory_at_start + limits.memory_growth_max

    def make_room(self, count: int) -> None:
        """Close `count` connections without a handshake because no descriptor is free. Keep the
        limit at what remains until `on_room_available`.
        """
        self._connections_max = max(0, min(self._connections_max, len(self._by_fd) - count))
        for peer in list(self._unshaken)[:count]:
            self._shut(peer)

    def on_room_available(self) -> None:
        """Restore the configured limit of connections: descriptors are free again."""
        self._connections_max = self.limits.connections_max

    def disconnected(self, fd: int, now_ns: int, empty_count: int) -> None:
        """Record the end of a connection. `empty_count` is the number of times the socket was read
        empty so far.
        """
        peer = self._by_fd.pop(fd, None)
        if peer is None:
            return
        self._unshaken.pop(peer, None)
        self.untaken_total -= peer.untaken
        peer.untaken = 0
        peer.is_closing = True
        self._unread.append((peer, now_ns, empty_count))
        if self._is_full and len(self._by_fd) < self.limits.connections_max * 15 // 16:
            self._is_full = False
            logger.info("connections_have_room count=%d", len(self._by_fd))

    def identify(self, identity: bytes, fd: int) -> PeerConnection | None:
        """Bind `identity` to the connection of `fd` and return it, or None if `fd` is unknown.

        It is called for the first message of an identity, and again after another identity replaced
        it. A descriptor is reused by later connections, and libzmq reads connections in turn. A
        closed connection's last message may therefore come after its successor's first. An identity
        displaced here may still be alive. Its next message restores it.
        """
        peer = self._by_fd.get(fd)
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
        return self._by_fd.get(peer.fd, peer) is not peer

    def is_open(self, peer: PeerConnection) -> bool:
        """True while no end of the connection was reported."""
        return self._by_fd.get(peer.fd) is peer

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
            self._unshaken.pop(peer, None)
        elif not peer.is_closing:
            self._unshaken[peer] = None

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
    def is_settled(self) -> bool:
        """True if the last sweep left nothing to check again while no byte comes."""
        return not (
            self._condemned
            or self._doomed
            or self._suspects
            or self._sending
            or self.untaken_total > SUSPECT_BYTES
            or self._memory_is_short
        )

    @property
    def has_ended(self) -> bool:
        """True if `drain_ended` may have something to return."""
        return bool(self._unread or self._displaced)

    def is_sender(self, peer: PeerConnection) -> bool:
        """True if `peer` certainly sent its last message. False while a closed connection with the
        same descriptor may still deliver messages (see `identify`).
        """
        return all(
            ended.fd != peer.fd or ended.identity is not None for ended, _, _ in self._unread
        )

    def condemn(self, identity: bytes, reason: str) -> None:
        """Close the sender of the last message at the sweep after the next, so that its error
        response can leave. While an ended connection of the same descriptor may be the sender (see
        `identify`), it is decided by later sweeps.
        """
        peer = self.by_identity.get(identity)
        if peer is None:
            return
        if self.is_open(peer) and self.is_sender(peer):
            self._condemn_sender(peer, reason)
        else:
            self._suspects[identity] = peer.fd, reason

    def _condemn_sender(self, peer: PeerConnection, reason: str) -> None:
        if not peer.is_closing and peer not in self._doomed:
            self._condemned[peer] = reason

    def _condemn_suspects(self, is_connected: Callable[[bytes], bool]) -> None:
        """Condemn each sender whose descriptor's ended connections have all been read: one that is
        still connected has the open connection.
        """
        unread = {ended.fd for ended, _, _ in self._unread}
        for identity, (fd, reason) in list(self._suspects.items()):
            if fd in unread:
                continue
            del self._suspects[identity]
            peer = self.by_identity.get(identity) or self._by_fd.get(fd)
            if peer is None or peer.fd != fd or not self.is_open(peer):
                continue
            if peer.identity not in (None, identity) or not is_connected(identity):
                continue
            if peer.identity is None:
                self.identify(identity, fd)
            self._condemn_sender(peer, reason)

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
        self._unshaken.pop(peer, None)
        self._sockets.shut(peer.fd, peer.inode)

    # ---- unsent responses ------------------------------------------------------------------------

    def needs_mark(self, peer: PeerConnection, cost: int) -> bool:
        """Count a response about to be sent. Return True if it must be sent with a tracker."""
        peer.sent += cost
        return peer.sent - peer.marked >= MARK_BYTES

    def mark(self, peer: PeerConnection, mark: Mark, buffer: bytearray | None, now_ns: int) -> None:
        """Record a tracked message. When `mark` is done, everything sent to `peer` before has left
        and `buffer` is free.
        """
        if not peer.marks:
            peer.progress_ns = now_ns
            self._sending.append(peer)
        self.unsent_total += peer.sent - peer.marked
        peer.marked = peer.sent
        peer.marks.append((peer.sent, mark, buffer))

    def settle(self, peer: PeerConnection, now_ns: int) -> list[bytearray]:
        """Count off messages that libzmq has released. Return the buffers that are free."""
        free = []
        marks = peer.marks
        while marks and marks[0][1].done:
            released, _, buffer = marks.popleft()
            self.unsent_total -= released - peer.released
            peer.released = released
            peer.progress_ns = now_ns
            if buffer is not None:
                free.append(buffer)
        return free

    def settle_some(self, count: int, now_ns: int) -> list[bytearray]:
        """Call `settle` for up to `count` peers in turn."""
        free = []
        for _ in range(min(count, len(self._sending))):
            peer = self._sending.popleft()
            free += self.settle(peer, now_ns)
            if peer.marks:
                self._sending.append(peer)
        return free

    # ---- sweeps ----------------------------------------------------------------------------------

    def sweep(
        self, now_ns: int, is_read: Callable[[], bool], is_connected: Callable[[bytes], bool]
    ) -> None:
        """Close the peers that exceed a limit.

        `is_connected` returns True if libzmq has a connection with this identity. It sends a
        message to find out.
        `is_read` returns True if everything libzmq had read has been received from it. If not (a
        front that is not fed yet or was suspended), waiting bytes are not the sender's fault, and
        only the sums are bounded.
        """
        for peer, reason in self._doomed.items():
            self.close(peer, reason)
        self._doomed, self._condemned = self._condemned, {}
        if self._suspects:
            self._condemn_suspects(is_connected)
        memory = self._sockets.private_bytes()
        is_short = memory > self._memory_max
        peers = (
            list(self._by_fd.values())
            if is_short or self.untaken_total > self.limits.untaken_max
            else self._next_of_round()
        )
        for peer in peers:
            if not peer.is_closing:
                self._check_peer(peer, now_ns, is_read)
        if self.untaken_total > self.limits.unshaken_max and is_read():
            self._close_largest(
                list(self._unshaken),
                self.limits.unshaken_max,
                "peers without a handshake have too much unfinished",
            )
        if self.untaken_total > self.limits.untaken_max:
            self._close_largest(
                list(self._by_fd.values()),
                self.limits.untaken_max,
                "all peers together have too much unfinished",
            )
        if self.unsent_total > self.limits.unsent_max:
            self._close_stalled(now_ns)
        if is_short:
            self._free_memory(memory, now_ns)
        self._memory_is_short = is_short

    def _next_of_round(self) -> list[PeerConnection]:
        if not self._round:
            self._round = list(self._by_fd.values())
        chosen, self._round = self._round[:SWEEP_PEERS], self._round[SWEEP_PEERS:]
        return chosen

    def _check_peer(self, peer: PeerConnection, now_ns: int, is_read: Callable[[], bool]) -> None:
        if peer.marks and now_ns - peer.progress_ns >= STALLED_NS:
            self.close(
                peer, f"it has read none of its responses for {STALLED_NS // 1_000_000_000} s"
            )
            return
        if peer.taken != peer.swept_taken:
            peer.swept_taken = peer.taken
            peer.swept_ns = now_ns  # a message ended since: it is not inside an endless one
        received = self._sockets.received_bytes(peer.fd) if peer.is_counted else -1
        if received < 0:
            return
        untaken = max(
            0,
            received
            - peer.taken
            - (now_ns - peer.accepted_ns) * KEEPALIVE_BYTES_PER_S // 1_000_000_000,
        )
        if untaken > SUSPECT_BYTES:
            untaken = max(0, untaken - self._sockets.waiting_bytes(peer.fd))
        self.untaken_total += untaken - peer.untaken
        peer.untaken = untaken
        credit = peer.credit
        allowed = (
            self.limits.unshaken_peer_max
            if credit is None
            else max(0, credit.granted - credit.received) + SESSION_SLACK_BYTES
        )
        # Counted bytes may have become whole messages since. `is_read` is called after the count.
        if untaken > allowed and is_read():
            self.close(peer, f"{untaken} bytes of requests that do not end; {allowed} are allowed")
        elif (
            credit is None
            and untaken > SUSPECT_BYTES
            and now_ns - peer.swept_ns >= UNSHAKEN_NS
            and is_read()
        ):
            self.close(
                peer, f"an unfinished message and no handshake for {UNSHAKEN_NS // 1_000_000_000} s"
            )

    def _close_largest(self, peers: list[PeerConnection], allowed: int, reason: str) -> None:
        """Close the peers with the most untaken bytes until the rest is within `allowed`."""
        remaining = sum(peer.untaken for peer in peers)
        for peer in sorted(peers, key=lambda p: -p.untaken) if remaining > allowed else ():
            if remaining <= allowed:
                return
            remaining -= peer.untaken
            self.close(peer, f"{reason}: {allowed} bytes are allowed")

    def _close_stalled(self, now_ns: int) -> None:
        """Close the peer with the most unsent bytes that has read nothing for SILENT_NS."""
        stalled = [
            p
            for p in self._sending
            if not p.is_closing and p.marks and now_ns - p.progress_ns >= SILENT_NS
        ]
        if stalled:
            self.close(
                max(stalled, key=lambda p: p.unsent),
                "it reads no responses, and other clients need the memory that they take",
            )

    def _free_memory(self, memory: int, now_ns: int) -> None:
        """Close a peer in the middle of a message when memory is short. Message parts without
        bytes, and peers without a byte count, cost memory that no account shows.
        """
        self._sockets.trim_memory()
        if self._sockets.private_bytes() <= self._memory_max:
            return
        if not self._memory_is_short:
            logger.warning("memory_short private_bytes=%d allowed=%d", memory, self._memory_max)
        quiet = [
            p
            for p in self._by_fd.values()
            if not p.is_closing and now_ns - p.swept_ns >= SWEEP_INTERVAL_NS
        ]
        counted = [p for p in quiet if p.is_counted and p.untaken > SUSPECT_BYTES]
        if counted:
            self.close(
                max(counted, key=lambda p: p.untaken),
                "memory is short, and it has most of a message that does not end",
            )
            return
        unseen = [p for p in quiet if not p.is_counted]
        unshaken = [p for p in unseen if p.credit is None]
        for peer in unshaken or [p for p in unseen if now_ns - p.swept_ns >= SILENT_NS]:
            self.close(
                peer,
                "memory is short, and it has sent no whole message for a while; it may connect "
                "again",
            )
