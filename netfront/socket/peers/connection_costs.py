"""Cost of connections: a sweep compares what each costs with its allowance, and closes peers that
are beyond.

libzmq buffers the parts of a message until the last has arrived, and no option bounds their number.
So the kernel's count of a connection's bytes is compared with the bytes of whole messages received.
The difference, less what the kernel still holds, is *untaken*. Responses that libzmq holds are
*unsent* (`unsent_responses`). A well-behaved client never meets these limits.

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
- This process's private memory <= memory_max, as long as a peer can be closed.

Connections without a byte count (Unix sockets) are bounded by the memory rule alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from netfront.socket.peers.connections import SWEEP_INTERVAL_NS, Connections
from netfront.socket.peers.peer_connection import PeerConnection
from netfront.socket.peers.socket_stats import SocketStats
from netfront.socket.peers.unsent_responses import UnsentResponses
from tailrace.protocol.frame import JSON_MAX_BYTES

logger = logging.getLogger(__name__)

SESSION_SLACK_BYTES = JSON_MAX_BYTES + (1 << 20) + (64 << 10)
"""Bytes beside batches: one JSON request, and many small requests that are not read yet."""
KEEPALIVE_BYTES_PER_S = 16
"""Allowance for ZMTP commands, which are received bytes but never messages."""
STALLED_NS = 30_000_000_000
UNSHAKEN_NS = 10_000_000_000
SILENT_NS = 1_000_000_000
SWEEP_PEERS = 256
SUSPECT_BYTES = 4 << 10


class ConnectionCosts:
    """Checks of all connections of a front."""

    def __init__(
        self, connections: Connections, unsent: UnsentResponses, sockets: SocketStats
    ) -> None:
        self._connections = connections
        self._unsent = unsent
        self._sockets = sockets
        self._round: list[PeerConnection] = []
        self._memory_at_start = sockets.private_bytes()
        self._memory_is_short = False

    @property
    def is_settled(self) -> bool:
        """True if the last sweep left nothing to check again while no byte comes."""
        return not (
            self._unsent or self._connections.untaken_total > SUSPECT_BYTES or self._memory_is_short
        )

    def sweep(self, now_ns: int, is_read: Callable[[], bool]) -> None:
        """Close the peers that exceed a limit.

        `is_read` returns True if everything libzmq had read has been received from it. If not (a
        front that is not fed yet or was suspended), waiting bytes are not the sender's fault, and
        only the sums are bounded.
        """
        connections, limits = self._connections, self._connections.limits
        memory = self._sockets.private_bytes()
        is_short = memory > self._memory_max
        peers = (
            list(connections.by_fd.values())
            if is_short or connections.untaken_total > limits.untaken_max
            else self._next_of_round()
        )
        for peer in peers:
            if not peer.is_closing:
                self._check_peer(peer, now_ns, is_read)
        if connections.untaken_total > limits.unshaken_max and is_read():
            self._close_largest(
                list(connections.unshaken),
                limits.unshaken_max,
                "peers without a handshake have too much unfinished",
            )
        if connections.untaken_total > limits.untaken_max:
            self._close_largest(
                list(connections.by_fd.values()),
                limits.untaken_max,
                "all peers together have too much unfinished",
            )
        if self._unsent.total > limits.unsent_max:
            self._close_silent(now_ns)
        if is_short:
            self._free_memory(memory, now_ns)
        self._memory_is_short = is_short

    @property
    def _memory_max(self) -> int:
        return self._memory_at_start + self._connections.limits.memory_growth_max

    def _next_of_round(self) -> list[PeerConnection]:
        if not self._round:
            self._round = list(self._connections.by_fd.values())
        chosen, self._round = self._round[:SWEEP_PEERS], self._round[SWEEP_PEERS:]
        return chosen

    def _check_peer(self, peer: PeerConnection, now_ns: int, is_read: Callable[[], bool]) -> None:
        if peer.marks and now_ns - peer.progress_ns >= STALLED_NS:
            self._connections.close(
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
        self._connections.untaken_total += untaken - peer.untaken
        peer.untaken = untaken
        credit = peer.credit
        allowed = (
            self._connections.limits.unshaken_peer_max
            if credit is None
            else max(0, credit.granted - credit.received) + SESSION_SLACK_BYTES
        )
        # Counted bytes may have become whole messages since. `is_read` is called after the count.
        if untaken > allowed and is_read():
            self._connections.close(
                peer, f"{untaken} bytes of requests that do not end; {allowed} are allowed"
            )
        elif (
            credit is None
            and untaken > SUSPECT_BYTES
            and now_ns - peer.swept_ns >= UNSHAKEN_NS
            and is_read()
        ):
            self._connections.close(
                peer, f"an unfinished message and no handshake for {UNSHAKEN_NS // 1_000_000_000} s"
            )

    def _close_largest(self, peers: list[PeerConnection], allowed: int, reason: str) -> None:
        """Close the peers with the most untaken bytes until the rest is within `allowed`."""
        remaining = sum(peer.untaken for peer in peers)
        for peer in sorted(peers, key=lambda p: -p.untaken) if remaining > allowed else ():
            if remaining <= allowed:
                return
            remaining -= peer.untaken
            self._connections.close(peer, f"{reason}: {allowed} bytes are allowed")

    def _close_silent(self, now_ns: int) -> None:
        """Close the peer with the most unsent bytes that has read nothing for SILENT_NS."""
        peer = self._unsent.largest_silent(now_ns - SILENT_NS)
        if peer is not None:
            self._connections.close(
                peer, "it reads no responses, and other clients need the memory that they take"
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
            for p in self._connections.by_fd.values()
            if not p.is_closing and now_ns - p.swept_ns >= SWEEP_INTERVAL_NS
        ]
        counted = [p for p in quiet if p.is_counted and p.untaken > SUSPECT_BYTES]
        if counted:
            self._connections.close(
                max(counted, key=lambda p: p.untaken),
                "memory is short, and it has most of a message that does not end",
            )
            return
        unseen = [p for p in quiet if not p.is_counted]
        unshaken = [p for p in unseen if p.credit is None]
        for peer in unshaken or [p for p in unseen if now_ns - p.swept_ns >= SILENT_NS]:
            self._connections.close(
                peer,
                "memory is short, and it has sent no whole message for a while; it may connect "
                "again",
            )
