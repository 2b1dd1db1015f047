"""Connections of a front, and what each of them costs it: what libzmq holds of a peer's unfinished messages, and of answers that it does not take.

libzmq gathers the parts of a message until the last has come, and no option bounds how many. So the kernel's count of a connection's bytes is compared
with the bytes that came out as whole messages; what lies between, and not in the kernel still, is *untaken*. Answers are counted as they are sent, and
counted off when libzmq lets go of a message that was marked; what lies between is *unsent*. A peer beyond its allowance is closed: a limit that a
well-behaved client never meets.

Owner: one front. Every 50 ms (`look`), while there are any, some connections are looked at in turn, all of them when memory is short. A quiet one cannot be
left out: an epoll of our own over libzmq's descriptors misses bytes that its thread has read before we are awake (tried), so nothing but looking tells
of a message that begins and does not end.
Invariants, within what can come between two looks:
    untaken <= unshaken_peer_max before our handshake, and of all those together <= unshaken_max;
    untaken <= what is granted and not received + SESSION_SLACK_BYTES behind it;   all together <= untaken_max;
    unsent <= UNSENT_PEER_MAX for each peer;   all together <= unsent_max;   connections <= connections_max;
    this process's private memory <= memory_max, as long as there is a peer to close.
What has no count of bytes (Unix sockets) is bounded by the rule of memory alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from netfront.credits import Credit
from netfront.peer_sockets import PeerSockets
from tailrace.protocol.wire import JSON_MAX_BYTES

logger = logging.getLogger(__name__)

SESSION_SLACK_BYTES = JSON_MAX_BYTES + (1 << 20) + (64 << 10)
"""Beside batches: one request of JSON, and many small ones that the front has not come to yet."""
KEEPALIVE_BYTES_PER_S = 16
"""ZMTP's own commands are bytes that never come out as messages."""
UNSENT_PEER_MAX = 48 << 20
"""The window of fetches (32 MiB) and one answer more."""
MARK_BYTES = 64 << 10
"""After so many bytes of small answers one is sent so that libzmq tells when it lets go of it."""
MESSAGE_COST_BYTES = 200
"""What a message costs beside its bytes."""
STALLED_NS = 30_000_000_000
UNSHAKEN_NS = 10_000_000_000
LOOK_NS = 50_000_000
LOOK_COUNT = 256
ROOM_NS = 1_000_000_000
"""A connection may stay for so long without our handshake although others find no room."""
SILENT_NS = 1_000_000_000
SUSPECT_BYTES = 4 << 10


class Limits(NamedTuple):
    """What all connections of a front together may cost."""

    connections_max: int
    unshaken_peer_max: int
    """Untaken bytes of one peer before our handshake. A client of a killed front's still has batches under way when it connects to its successor."""
    unshaken_max: int
    """Of all of them together."""
    untaken_max: int
    unsent_max: int
    memory_growth_max: int
    """Of private memory, over what the process had when it began to listen."""


class Mark(Protocol):
    """Of a message: whether libzmq has let go of it (see `zmq.MessageTracker`)."""

    @property
    def done(self) -> bool: ...


class Peer:
    """One connection."""

    __slots__ = (
        "accepted_ns", "buffers", "credit", "fd", "identity", "inode", "is_closing", "is_counted", "looked_ns", "marked", "marks", "progress_ns",
        "released", "seen_taken", "sent", "taken", "untaken",
    )  # fmt: skip

    def __init__(self, fd: int, inode: int, is_counted: bool, now_ns: int) -> None:
        self.fd = fd
        self.inode = inode
        self.is_counted = is_counted
        """Whether the kernel counts its bytes."""
        self.accepted_ns = self.looked_ns = self.progress_ns = now_ns
        self.identity: bytes | None = None
        self.credit: Credit | None = None
        """Since our handshake."""
        self.is_closing = False
        self.taken = 0
        """Bytes on the wire of the whole messages that came."""
        self.seen_taken = 0
        self.untaken = 0
        self.sent = self.marked = self.released = 0
        """What its answers cost: up to the last, up to the last with a mark, up to the last mark that libzmq let go of."""
        self.marks: deque[tuple[int, Mark, bytearray | None]] = deque()

    @property
    def unsent(self) -> int:
        """Of answers up to the last that was marked; what came after is less than MARK_BYTES, or has begun to wait only now."""
        return self.marked - self.released


class Peers:
    """All connections of a front."""

    def __init__(self, sockets: PeerSockets, limits: Limits) -> None:
        self._sockets = sockets
        self.limits = limits
        self._by_fd: dict[int, Peer] = {}
        self.by_identity: dict[bytes, Peer] = {}
        self._unshaken: OrderedDict[Peer, None] = OrderedDict()
        """Connections without our handshake, oldest first."""
        self._unread: deque[tuple[Peer, int, int]] = deque()
        """Connections that have ended -> what they had sent may still be read."""
        self._displaced: list[bytes] = []
        """Identities whose connection's descriptor has come to mean another one."""
        self._credits: dict[bytes, Credit] = {}
        """Of identities with our handshake."""
        self._condemned: dict[Peer, str] = {}
        """Peers that are closed at the look after the next, and why."""
        self._doomed: dict[Peer, str] = {}
        """Those that are closed at the next."""
        self._round: list[Peer] = []
        self._sending: deque[Peer] = deque()
        """Peers with marks that libzmq has not let go of, when they were last looked at."""
        self.untaken_total = 0
        self.unsent_total = 0
        self.closed_count = 0
        """How many connections were closed for what they cost."""
        self._memory_max = sockets.private_bytes() + limits.memory_growth_max
        self._connections_max = limits.connections_max
        self._is_full = False
        self._memory_is_short = False

    def __len__(self) -> int:
        return len(self._by_fd)

    # ---- beginning and end -------------------------------------------------------------------------------------------------------------

    def accepted(self, fd: int, is_counted: bool, now_ns: int) -> None:
        """A connection has come. With too many of them one is closed: the one that has done nothing for longest, else this one."""
        peer = self._by_fd[fd] = Peer(fd, self._sockets.inode(fd), is_counted, now_ns)
        self._unshaken[peer] = None
        if is_counted:
            self._sockets.hold_little_if_near(fd)
        if len(self._by_fd) <= self._connections_max:
            return
        if not self._is_full and self._connections_max == self.limits.connections_max:
            self._is_full = True
            logger.warning("connections_full count=%d: raise connections.max, and the limit of open files with it", len(self._by_fd) - 1)
        oldest = next(iter(self._unshaken))
        self._shut(oldest if now_ns - oldest.accepted_ns >= ROOM_NS else peer)

    def make_room(self, count: int) -> None:
        """No descriptor is left: close so many connections without our handshake, and for a while take no more than there are then."""
        self._connections_max = max(0, min(self._connections_max, len(self._by_fd) - count))
        for peer in list(self._unshaken)[:count]:
            self._shut(peer)

    def room_is_back(self) -> None:
        """There are descriptors again: as many connections as the settings allow."""
        self._connections_max = self.limits.connections_max

    def disconnected(self, fd: int, now_ns: int, empty_count: int) -> None:
        """A connection has ended. `empty_count`: how often the socket was read until it was empty."""
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

    def meet(self, identity: bytes, fd: int) -> Peer | None:
        """The first message of `identity` came over `fd`, or the first since another identity took its place there. None: nothing is known of `fd`.

        A descriptor means one connection after the other, and libzmq takes messages from connections in turn: what one sent that has ended may come behind
        what its successor sent. So an identity that is displaced here may live; its next message puts it back.
        """
        peer = self._by_fd.get(fd)
        if peer is None or peer.identity is not None:
            ended = [ended for ended, _, _ in self._unread if ended.fd == fd]
            peer = next((ended for ended in ended if ended.identity is None), None) or peer or next(iter(ended), None)
        if peer is None:
            return None
        if peer.identity is not None:
            self.by_identity.pop(peer.identity, None)
            self._displaced.append(peer.identity)
        peer.identity = identity
        self.by_identity[identity] = peer
        self._note_credit(peer)
        return peer

    def shaken(self, identity: bytes, credit: Credit | None) -> None:
        """Our handshake was made with `identity` (its credit), or its session was dropped (None)."""
        if credit is None:
            self._credits.pop(identity, None)
        else:
            self._credits[identity] = credit
        peer = self.by_identity.get(identity)
        if peer is not None:
            self._note_credit(peer)

    def _note_credit(self, peer: Peer) -> None:
        peer.credit = self._credits.get(peer.identity) if peer.identity is not None else None
        if peer.credit is not None:
            self._unshaken.pop(peer, None)
        elif not peer.is_closing:
            self._unshaken[peer] = None

    def take_ended(self, now_ns: int, empty_count: int) -> list[bytes]:
        """Identities of which nothing more will come: their connection has ended, and what they had sent was read. One whose descriptor another identity
        was met on may be among them although it lives: see `meet`.
        """
        ended, self._displaced = self._displaced, []
        while self._unread:
            peer, since_ns, empty_then = self._unread[0]
            # libzmq tells of the end a moment before it hands over what came last: give it a moment.
            if empty_count <= empty_then or now_ns - since_ns < LOOK_NS // 5:
                break
            self._unread.popleft()
            if peer.identity is not None and self.by_identity.get(peer.identity) is peer:
                del self.by_identity[peer.identity]
                ended.append(peer.identity)
        return ended

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` may have something to return."""
        return bool(self._unread or self._displaced)

    def is_sender(self, peer: Peer) -> bool:
        """Whether the last message taken for `peer`'s is known to be: not while one that had its descriptor before has ended and its messages may come
        still (see `meet`).
        """
        return all(ended.fd != peer.fd or ended.identity is not None for ended, _, _ in self._unread)

    def condemn(self, peer: Peer, reason: str) -> None:
        """Close the connection that sent the last message when what it was sent has had the time between two looks to leave."""
        if not peer.is_closing and peer not in self._doomed and self.is_sender(peer):
            self._condemned[peer] = reason

    def close(self, peer: Peer, reason: str) -> None:
        """Close the connection, for what it costs."""
        if peer.is_closing:
            return
        self.closed_count += 1
        logger.warning(
            "peer_closed reason=%r shaken=%s untaken_bytes=%d unsent_bytes=%d",
            reason, peer.credit is not None, peer.untaken, peer.unsent,
        )  # fmt: skip
        self._shut(peer)

    def _shut(self, peer: Peer) -> None:
        peer.is_closing = True
        self._unshaken.pop(peer, None)
        self._sockets.shut(peer.fd, peer.inode)

    # ---- what was not sent yet -----------------------------------------------------------------------------------------------------------

    def wants_mark(self, peer: Peer, cost: int) -> bool:
        """Count an answer that is about to be sent; whether libzmq is to tell when it lets go of it."""
        peer.sent += cost
        return peer.sent - peer.marked >= MARK_BYTES

    def mark(self, peer: Peer, mark: Mark, buffer: bytearray | None, now_ns: int) -> None:
        """Everything that was sent to `peer` so far has left when `mark` is done; then `buffer` is free."""
        if not peer.marks:
            peer.progress_ns = now_ns
            self._sending.append(peer)
        self.unsent_total += peer.sent - peer.marked
        peer.marked = peer.sent
        peer.marks.append((peer.sent, mark, buffer))

    def settle(self, peer: Peer, now_ns: int) -> list[bytearray]:
        """Count off what libzmq has let go of; returns the buffers that are free."""
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
        """`settle` for up to `count` peers, in turn."""
        free = []
        for _ in range(min(count, len(self._sending))):
            peer = self._sending.popleft()
            free += self.settle(peer, now_ns)
            if peer.marks:
                self._sending.append(peer)
        return free

    # ---- looking -------------------------------------------------------------------------------------------------------------------------

    def look(self, now_ns: int, is_read: Callable[[], bool]) -> None:
        """Close the peers that cost more than is allowed. `is_read`: whether everything that libzmq had read when it is asked has been taken from it; if not
        (a front that is not fed yet, or has just been stopped for a while), what waits is not its sender's fault, and the sums alone are bounded.
        """
        for peer, reason in self._doomed.items():
            self.close(peer, reason)
        self._doomed, self._condemned = self._condemned, {}
        memory = self._sockets.private_bytes()
        is_short = memory > self._memory_max
        peers = list(self._by_fd.values()) if is_short or self.untaken_total > self.limits.untaken_max else self._next_of_round()
        for peer in peers:
            if not peer.is_closing:
                self._look_at(peer, now_ns, is_read)
        if self.untaken_total > self.limits.unshaken_max and is_read():
            self._close_largest(list(self._unshaken), self.limits.unshaken_max, "peers without a handshake have too much unfinished")
        if self.untaken_total > self.limits.untaken_max:
            self._close_largest(list(self._by_fd.values()), self.limits.untaken_max, "all peers together have too much unfinished")
        if self.unsent_total > self.limits.unsent_max:
            self._close_stalled(now_ns)
        if is_short:
            self._free_memory(memory, now_ns)
        self._memory_is_short = is_short

    def _next_of_round(self) -> list[Peer]:
        if not self._round:
            self._round = list(self._by_fd.values())
        chosen, self._round = self._round[:LOOK_COUNT], self._round[LOOK_COUNT:]
        return chosen

    def _look_at(self, peer: Peer, now_ns: int, is_read: Callable[[], bool]) -> None:
        if peer.marks and now_ns - peer.progress_ns >= STALLED_NS:
            self.close(peer, f"it has taken none of its answers for {STALLED_NS // 1_000_000_000} s")
            return
        if peer.taken != peer.seen_taken:
            peer.seen_taken = peer.taken
            peer.looked_ns = now_ns  # as of now it is not in the middle of an endless message
        received = self._sockets.received_bytes(peer.fd) if peer.is_counted else -1
        if received < 0:
            return
        untaken = max(0, received - peer.taken - (now_ns - peer.accepted_ns) * KEEPALIVE_BYTES_PER_S // 1_000_000_000)
        if untaken > SUSPECT_BYTES:
            untaken = max(0, untaken - self._sockets.waiting_bytes(peer.fd))
        self.untaken_total += untaken - peer.untaken
        peer.untaken = untaken
        credit = peer.credit
        allowed = self.limits.unshaken_peer_max if credit is None else max(0, credit.granted - credit.received) + SESSION_SLACK_BYTES
        # What was counted may have become whole messages since: whether these were taken is asked after the count.
        if untaken > allowed and is_read():
            self.close(peer, f"{untaken} bytes of requests that do not end; {allowed} are allowed")
        elif credit is None and untaken > SUSPECT_BYTES and now_ns - peer.looked_ns >= UNSHAKEN_NS and is_read():
            self.close(peer, f"an unfinished message and no handshake for {UNSHAKEN_NS // 1_000_000_000} s")

    def _close_largest(self, peers: list[Peer], allowed: int, reason: str) -> None:
        """Close those with most untaken until what the others of `peers` have is allowed."""
        remaining = sum(peer.untaken for peer in peers)
        for peer in sorted(peers, key=lambda p: -p.untaken) if remaining > allowed else ():
            if remaining <= allowed:
                return
            remaining -= peer.untaken
            self.close(peer, f"{reason}: {allowed} bytes are allowed")

    def _close_stalled(self, now_ns: int) -> None:
        """Answers fill what there is for them: close the peer that holds most of it and has taken nothing for a second."""
        stalled = [p for p in self._sending if not p.is_closing and p.marks and now_ns - p.progress_ns >= SILENT_NS]
        if stalled:
            self.close(max(stalled, key=lambda p: p.unsent), "others wait for the memory that its answers take, and it takes none of them")

    def _free_memory(self, memory: int, now_ns: int) -> None:
        """Parts without bytes, and peers that are not counted, cost memory that no ledger shows: peers in the middle of a message are suspected."""
        self._sockets.give_back_memory()
        if self._sockets.private_bytes() <= self._memory_max:
            return
        if not self._memory_is_short:
            logger.warning("memory_short private_bytes=%d allowed=%d", memory, self._memory_max)
        quiet = [p for p in self._by_fd.values() if not p.is_closing and now_ns - p.looked_ns >= LOOK_NS]
        counted = [p for p in quiet if p.is_counted and p.untaken > SUSPECT_BYTES]
        if counted:
            self.close(max(counted, key=lambda p: p.untaken), "memory is short, and it has most of a message that does not end")
            return
        unseen = [p for p in quiet if not p.is_counted]
        unshaken = [p for p in unseen if p.credit is None]
        for peer in unshaken or [p for p in unseen if now_ns - p.looked_ns >= SILENT_NS]:
            self.close(peer, "memory is short, and it has sent no whole message for a while; it may connect again")
