"""Unsent responses: how many bytes libzmq holds for each peer, and which buffers it has released.

Responses are counted when sent. Some are marked, and sent with a tracker: when libzmq has released
a marked message, all before it have left, too.

Owner: one front.

Invariants:
- A peer's `released <= marked <= sent`, and `total` is the sum of `marked - released`.
- `sent - marked` is less than MARK_BYTES, or the response is new.
"""

from __future__ import annotations

from collections import deque

from netfront.socket.peers.peer_connection import Mark, PeerConnection

MARK_BYTES = 64 << 10
"""Bytes of small responses after which one is sent with a tracker."""
MESSAGE_COST_BYTES = 200
"""Memory cost of a message beside its bytes."""
UNSENT_PEER_MAX = 48 << 20
"""The fetch window (32 MiB) and one more response."""


class UnsentResponses:
    """The responses of all peers of a front."""

    def __init__(self) -> None:
        self.total = 0
        """Bytes held for all peers, as of each one's last check."""
        self._sending: deque[PeerConnection] = deque()
        """Peers that had unreleased marks at their last check."""

    def __bool__(self) -> bool:
        return bool(self._sending)

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
        self.total += peer.sent - peer.marked
        peer.marked = peer.sent
        peer.marks.append((peer.sent, mark, buffer))

    def settle(self, peer: PeerConnection, now_ns: int) -> list[bytearray]:
        """Count off messages that libzmq has released. Return the buffers that are free."""
        free = []
        marks = peer.marks
        while marks and marks[0][1].done:
            released, _, buffer = marks.popleft()
            self.total -= released - peer.released
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

    def largest_silent(self, until_ns: int) -> PeerConnection | None:
        """The peer with the most unsent bytes of those that have read nothing since `until_ns`."""
        silent = [
            peer
            for peer in self._sending
            if not peer.is_closing and peer.marks and peer.progress_ns <= until_ns
        ]
        return max(silent, key=lambda peer: peer.unsent, default=None)
