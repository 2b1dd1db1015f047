"""Response sender: the sends of a front's ZeroMQ socket, and the buffers in use by libzmq.

A response whose memory libzmq holds until it is on the wire is sent with a tracker
(`unsent_responses`). A client that reads nothing, or whose queue is full, is disconnected: it would
wait for the response that was lost.

Owner: one front.

Invariants:
- A buffer is reused only after libzmq has released it.
- With connections that are checked, nothing is sent to an identity whose connection has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from netfront.socket.listening_socket import QUEUE_MESSAGES
from netfront.socket.message_socket import LENT_FROM_BYTES, MessageSocket
from netfront.socket.peers.connections import Connections
from netfront.socket.peers.peer_connection import PeerConnection
from netfront.socket.peers.unsent_responses import (
    MESSAGE_COST_BYTES,
    UNSENT_PEER_MAX,
    UnsentResponses,
)
from netfront.socket.send_buffers import SendBuffers
from tailrace.format.crc32c import Readable

_NOBLOCK, _SEND_FIRST = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain integers, because operations on enum members run Python code."""


class ResponseSender:
    """Sends by identity. `Router` offers its methods as its own."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        messages: MessageSocket,
        peers: Connections,
        has_left: Callable[[bytes], bool] | None,
    ) -> None:
        """`has_left`: True if a checked connection has ended; None: connections are not checked."""
        self._socket = socket
        self._messages = messages
        self._peers = peers
        self._has_left = has_left
        self._buffers = SendBuffers()
        self.unsent = UnsentResponses()
        self.sent_pages = 0
        """Pages of 4 KiB that were sent from buffers."""
        self.now_ns = 0

    def try_send(self, identity: bytes, frames: Sequence[Readable]) -> bool:
        """Queue a message. Return False if the client is gone or its queue is full."""
        self._messages.is_drained = False
        if self._has_left is not None and self._has_left(identity):
            return False
        peer = self._peers.by_identity.get(identity)
        if peer is None or not self.unsent.needs_mark(
            peer, sum(map(len, frames)) + MESSAGE_COST_BYTES
        ):
            try:
                self._messages.send([identity, *frames])
            except zmq.ZMQError as error:
                return self._not_sent(peer, error)
            return True
        return self._send_marked(peer, [identity, *frames[:-1]], frames[-1], None)

    def try_send_buffer(
        self, identity: bytes, frames: Sequence[Readable], data: memoryview
    ) -> bool:
        """Queue a message whose last frame is part of a buffer from `new_buffer`. The buffer is
        reused after it is sent.
        """
        self._messages.is_drained = False
        self.sent_pages += len(data) >> 12
        buffer = data.obj
        assert isinstance(buffer, bytearray)
        if self._has_left is not None and self._has_left(identity):
            self._buffers.give_back(buffer)
            return False
        peer = self._peers.by_identity.get(identity)
        marked = peer is not None and self.unsent.needs_mark(
            peer, sum(map(len, frames)) + len(data) + MESSAGE_COST_BYTES
        )
        if peer is not None and (marked or len(data) >= LENT_FROM_BYTES):
            # libzmq sends from the buffer: it is free at its mark
            return self._send_marked(peer, [identity, *frames], data, buffer)
        try:
            self._messages.send([identity, *frames, data])  # libzmq copies: the buffer is free now
        except zmq.ZMQError as error:
            return self._not_sent(peer, error)
        finally:
            self._buffers.give_back(buffer)
        return True

    def _send_marked(
        self,
        peer: PeerConnection,
        frames: Sequence[Readable],
        last: Readable,
        buffer: bytearray | None,
    ) -> bool:
        """Send `frames` and `last`, with a tracker that reports when libzmq has released `last`.

        If too many bytes wait for the peer already, close it and return False.
        """
        if peer.unsent > UNSENT_PEER_MAX:
            self._settle(peer)
            if peer.unsent > UNSENT_PEER_MAX:
                self._peers.close(
                    peer, f"it reads no responses, and {peer.unsent} bytes wait for it"
                )
                return False
        try:
            for frame in frames:
                self._socket.send(frame, _SEND_FIRST)
            tracker = self._socket.send(last, _NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            return self._not_sent(peer, error)
        assert tracker is not None
        self.unsent.mark(peer, tracker, buffer, self.now_ns)
        return True

    def _not_sent(self, peer: PeerConnection | None, error: zmq.ZMQError) -> bool:
        """Close a peer whose queue is full, since it would wait for the lost response.

        Return False.
        """
        if peer is not None and error.errno == zmq.EAGAIN:
            self._peers.close(
                peer, f"it reads no responses, and {QUEUE_MESSAGES} of them wait for it"
            )
        return False

    def unsent_bytes(self, identity: bytes) -> int:
        """Return the response bytes that libzmq holds for this client. Small amounts count as 0."""
        peer = self._peers.by_identity.get(identity)
        if peer is None:
            return 0
        self._settle(peer)
        return peer.unsent

    def unsent_total(self) -> int:
        """Return the response bytes held for all clients, as of each one's last check."""
        return self.unsent.total

    # ---- buffers ---------------------------------------------------------------------------------

    def new_buffer(self, size: int) -> bytearray:
        """Return a buffer of at least `size` bytes with arbitrary content."""
        self.settle_some(4, self.now_ns)
        return self._buffers.take(size)

    def settle_some(self, count: int, now_ns: int) -> None:
        """Take back the buffers that libzmq has released, of up to `count` peers in turn."""
        for buffer in self.unsent.settle_some(count, now_ns):
            self._buffers.give_back(buffer)

    def _settle(self, peer: PeerConnection) -> None:
        for buffer in self.unsent.settle(peer, self.now_ns):
            self._buffers.give_back(buffer)
