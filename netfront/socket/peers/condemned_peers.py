"""Condemned peers: connections that are closed a little later, so that their error response can
leave.

A descriptor of an ended connection is another one's at once. While messages of the ended one may
still be read, the sender of a message is not certain: it is a *suspect* until they are read.

Owner: one front.

Invariants: a connection is closed only for a message that it has sent.
"""

from __future__ import annotations

from collections.abc import Callable

from netfront.socket.peers.connections import Connections
from netfront.socket.peers.peer_connection import PeerConnection


class CondemnedPeers:
    """Peers of a front that are going to be closed."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._condemned: dict[PeerConnection, str] = {}
        """Peers to close at the sweep after the next, with the reason."""
        self._doomed: dict[PeerConnection, str] = {}
        """Peers to close at the next sweep, with the reason."""
        self._suspects: dict[bytes, tuple[int, str]] = {}
        """Senders to close once it is known which connection of their descriptor they have: the
        descriptor and the reason.
        """

    def __bool__(self) -> bool:
        return bool(self._condemned or self._doomed or self._suspects)

    def condemn(self, identity: bytes, reason: str) -> None:
        """Close the sender of the last message at the sweep after the next. While an ended
        connection of the same descriptor may be the sender (see `Connections.identify`), it is
        decided by later sweeps.
        """
        peer = self._connections.by_identity.get(identity)
        if peer is None:
            return
        if self._connections.is_open(peer) and self._connections.is_sender(peer):
            self._condemn_sender(peer, reason)
        else:
            self._suspects[identity] = peer.fd, reason

    def sweep(self, is_connected: Callable[[bytes], bool]) -> None:
        """Close those whose time has come."""
        for peer, reason in self._doomed.items():
            self._connections.close(peer, reason)
        self._doomed, self._condemned = self._condemned, {}
        if self._suspects:
            self._condemn_suspects(is_connected)

    def _condemn_sender(self, peer: PeerConnection, reason: str) -> None:
        if not peer.is_closing and peer not in self._doomed:
            self._condemned[peer] = reason

    def _condemn_suspects(self, is_connected: Callable[[bytes], bool]) -> None:
        """Condemn each sender whose descriptor's ended connections have all been read: one that is
        still connected has the open connection.
        """
        connections = self._connections
        unread = connections.unread_descriptors()
        for identity, (fd, reason) in list(self._suspects.items()):
            if fd in unread:
                continue
            del self._suspects[identity]
            peer = connections.by_identity.get(identity) or connections.by_fd.get(fd)
            if peer is None or peer.fd != fd or not connections.is_open(peer):
                continue
            if not is_connected(identity):
                continue
            if peer.identity != identity:
                # a late message of an ended connection had taken its place
                connections.identify(identity, fd)
            self._condemn_sender(peer, reason)
