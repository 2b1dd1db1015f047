"""Router: the ZeroMQ socket of a front and its connections.

ROUTER_MANDATORY makes sends to a closed client or a full queue fail instead of dropping the
message. `ResponseSender` sends. `peers` accounts for the cost of connections. `Monitor` reports
connections that open and close.

Owner: one front.

Invariants:
- `watch` is called at `watch_at_ns`, and whenever the monitor's descriptor is readable, for that
  reason once in MONITOR_REST_NS. libzmq's thread blocks while the monitor is full.
- With `security` a message is of the connection that sent it, not of its identity: each one's
  user id is compared.
- While clients are silent no sweep is due (see `sweep_pause`).
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import zmq

from netfront.socket.flow_control import Credit
from netfront.socket.io_thread_slice import IoThreadSlice, io_threads, set_slice_ns
from netfront.socket.listening_socket import (
    NONE_GIVEN,
    ListeningSockets,
    begin_zero_copy,
    listen,
    new_socket,
)
from netfront.socket.message_socket import MessageSocket, taken_frame
from netfront.socket.monitor import Monitor
from netfront.socket.peers.condemned_peers import CondemnedPeers
from netfront.socket.peers.connection_costs import ConnectionCosts
from netfront.socket.peers.connections import SWEEP_INTERVAL_NS, Connections, Limits
from netfront.socket.peers.peer_connection import PeerConnection
from netfront.socket.peers.socket_stats import KernelSocketStats, SocketStats
from netfront.socket.peers.sweep_pause import SweepPause, cpu_clock
from netfront.socket.response_sender import ResponseSender
from netfront.socket.transport import Watched
from shm.queues.doorbell import Doorbell
from shm.runtime.timing_wheel import NEVER_NS
from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import API_VERSIONS, PUSH_CORRELATION_ID, Api, encode_response

if TYPE_CHECKING:
    from netfront.socket.zap import Allows, Claim, ZapHandler

logger = logging.getLogger(__name__)

PARTS_MAX = 16
"""A message of more parts cannot be a request. Its sender is disconnected."""
DISCARDED_AT_ONCE = 2048
SPARE_DESCRIPTORS = 8
"""Connections closed when no descriptor is free."""
RELISTEN_NS = 500_000_000
MONITOR_REST_NS = 10_000_000
"""Time after a look at the monitor in which its events do not end the front's sleep. Strangers who
knock by the thousand would wake it for each of them.
"""
_PROBE = encode_response(
    Api.CREDIT, API_VERSIONS[Api.CREDIT][0], PUSH_CORRELATION_ID, ErrorCode.OK, 0, 0
)
"""A push that allows nothing: clients take it for an old one."""
_EVENTS, _POLLIN, _RCVMORE, _NOBLOCK, _SRCFD = (
    int(zmq.EVENTS),
    int(zmq.POLLIN),
    int(zmq.RCVMORE),
    int(zmq.NOBLOCK),
    int(zmq.SRCFD),
)
"""Plain integers, because operations on enum members run Python code."""
_CURVE_BYTES = 33
"""Bytes of an encrypted frame beside its content: command name 8, nonce 8, tag 16, flags 1."""


class Security(NamedTuple):
    """Keys and rights by which a socket lets clients in."""

    secret_key: str
    """The server's, Z85."""
    allows: Allows


def encrypted_bytes(frames: Sequence[Readable]) -> int:
    """Bytes on the wire of an encrypted message, identity first."""
    sizes = [len(frame) + _CURVE_BYTES for frame in frames[1:]]
    return sum(size + (2 if size < 256 else 9) for size in sizes)


class Router:
    """A bound socket and its connections."""

    def __init__(
        self,
        addresses: list[str],
        message_max_bytes: int,
        limits: Limits,
        given: ListeningSockets = NONE_GIVEN,
        sockets: SocketStats | None = None,
        security: Security | None = None,
    ) -> None:
        """Bind to all `addresses`, or use the sockets that are `given` for them.

        `message_max_bytes` is the largest frame accepted. With `security` connections are checked,
        and those over TCP encrypted. Raises AddressInUseError.
        """
        self._context = zmq.Context()
        socket = self.socket = new_socket(self._context, message_max_bytes)
        self.zap: ZapHandler | None = None
        if security is not None:
            from netfront.socket.zap import ZapHandler, decode_claim, protect

            self.zap = ZapHandler(self._context, security.allows)
            self._decode_claim = decode_claim
            protect(socket)
        self._monitor = Monitor(self._context, socket)
        self.monitor_fd = self._monitor.fd
        self.fd = int(socket.getsockopt(zmq.FD))
        self._messages = MessageSocket(socket)
        self._poll: select.poll | None = None
        self._poll_resting: select.poll | None = None
        """As `_poll`, without the monitor."""
        self._socket_paths = [
            address.removeprefix("ipc://")
            for address in addresses
            if address.startswith("ipc:///") and address not in given.by_address
        ]
        self.port = listen(
            socket, addresses, given, "" if security is None else security.secret_key
        )
        begin_zero_copy(self._context)
        self._io_thread_slice = IoThreadSlice(lambda slice_ns: set_slice_ns(io_threads(), slice_ns))
        self._pause = SweepPause(cpu_clock(io_threads), time.monotonic_ns)
        self._moved = 0
        """Messages received, and pages of 4 KiB received."""
        self._relisten_ns = NEVER_NS
        self._own_sockets = KernelSocketStats()
        stats = sockets or self._own_sockets
        self._peers = Connections(stats, limits)
        self._sender = ResponseSender(
            socket, self._messages, self._peers, None if security is None else self._has_left
        )
        # Its methods are those of this transport, without a call in between.
        self.try_send, self.try_send_buffer = self._sender.try_send, self._sender.try_send_buffer
        self.new_buffer = self._sender.new_buffer
        self.unsent_bytes, self.unsent_total = self._sender.unsent_bytes, self._sender.unsent_total
        self._condemned = CondemnedPeers(self._peers)
        self._costs = ConnectionCosts(self._peers, self._sender.unsent, stats)
        self._known = self._peers.by_identity if security is None else {}
        """Connections whose messages are received without a check of their sender."""
        self.on_rebound: Callable[[bytes], None] = lambda _identity: None
        """Gets an identity whose next message is another connection's than the last one, where
        connections are checked. The front ends its session.
        """
        self._now_ns = 0
        self.watch_at_ns = 0
        self._sweep_at_ns = 0
        self._empty_count = 0
        """Number of reads that found the socket empty."""
        self._empty_at_check = 0
        self._is_quiet = False
        """True if no message had arrived when this loop step began."""
        self._discards = False
        self._reported_closed = 0

    # ---- receiving -------------------------------------------------------------------------------

    def set_limits(self, limits: Limits) -> None:
        """Change the limits of connections."""
        self._peers.set_limits(limits)

    def try_receive(self) -> list[bytes] | None:
        """Return one whole message, identity first, or None."""
        if self._is_quiet:
            self._is_quiet = False
            self._empty_count += 1
            return None
        if self._discards:
            if self.has_input():
                self._discard()
            else:
                self._empty_count += 1
            return None
        messages, known = self._messages, self._known
        frames = messages.try_receive(known, PARTS_MAX)
        if frames is None:
            messages.is_drained = True
            self._empty_count += 1
            return None
        messages.is_drained = False
        peer = known.get(frames[0])
        taken = messages.taken
        if messages.has_rest and peer is None:
            peer, taken = self._receive_first(frames)
            if peer is None:
                return None
        if len(frames) > PARTS_MAX:
            self._discards = True
            is_sure = peer is None or self._peers.is_sender(peer)
            if peer is not None and is_sure:
                self._peers.close(peer, f"a message of more than {PARTS_MAX - 1} parts")
            self._discard()
            # an unsure sender gets an error response, which goes by its identity
            return None if is_sure else frames
        self._moved += 1 + (taken >> 12)
        if peer is not None:
            is_encrypted = peer.claim is not None and peer.claim.key
            peer.taken += encrypted_bytes(frames) if is_encrypted else taken
        return frames

    def _receive_first(self, frames: list[bytes]) -> tuple[PeerConnection | None, int]:
        """Receive the rest of the first message of an unknown sender. Return its connection and the
        message's bytes on the wire.
        """
        receive = self.socket.recv
        frame = receive(_NOBLOCK, False)
        peer = (
            self._identify(frames[0], frame)
            if self.zap is None
            else self._identify_checked(frames[0], frame)
        )
        if peer is None:
            self._discards = True
            self._discard()
            return None, 0
        taken = 0
        while True:
            part = taken_frame(frame, len(frames))
            taken += len(part) + (2 if len(part) < 256 else 9)  # see `MessageSocket.taken`
            frames.append(part)
            if not frame.more or len(frames) > PARTS_MAX:
                return peer, taken
            frame = receive(_NOBLOCK, False)

    def _identify(self, identity: bytes, first: zmq.Frame) -> PeerConnection | None:
        """Return the connection of an identity's first message.

        Return None for a ZMTP older than 3.0 or another protocol: libzmq cannot attribute its
        messages. It cannot be served, and is closed when its bytes reach its allowance.
        """
        self._read_monitor()  # libzmq reports a connection before its first message
        self.watch_at_ns = 0  # reading here has made the monitor's descriptor silent
        try:
            fd = int(first.get(_SRCFD))
        except zmq.ZMQError:
            return None
        return self._peers.identify(identity, fd)

    def _identify_checked(self, identity: bytes, first: zmq.Frame) -> PeerConnection | None:
        """Return the connection that sent a message, where connections are checked.

        A client chooses its identity. So the identity alone does not tell who sent the message:
        another connection that has it now gets nothing of the one before.
        """
        user_id, peer = str(first.get("User-Id")), self._peers.by_identity.get(identity)
        if (
            peer is not None
            and peer.user_id == user_id
            and peer.fd == int(first.get(_SRCFD))
            # libzmq gives the identities that begin with a zero, none of them twice
            and (identity[:1] == b"\0" or not self._peers.has_successor(peer))
        ):
            return peer
        self.on_rebound(identity)
        if peer is not None:
            self._read_monitor()
            self._peers.unbind(peer)
        peer = self._identify(identity, first)
        if peer is not None:
            peer.user_id, peer.claim = user_id, self._decode_claim(user_id)
        return peer

    def _has_left(self, identity: bytes) -> bool:
        """True if a checked connection has ended: another one may have its identity by now."""
        if int(self._monitor.socket.get(_EVENTS)) & _POLLIN:
            self._read_monitor()
            self.watch_at_ns = 0  # see `_identify`
        peer = self._peers.by_identity.get(identity)
        return peer is None or not self._peers.is_open(peer)

    def _discard(self) -> None:
        """Discard the rest of a message with too many parts, a slice at a time,
        so that others are served.
        """
        for _ in range(DISCARDED_AT_ONCE):
            if not self.socket.get(_RCVMORE):
                self._discards = False
                return
            self.socket.recv(_NOBLOCK)

    def has_input(self) -> bool:
        """True if a message waits. Any use of the socket may have consumed the descriptor's event,
        so the descriptor alone does not tell.
        """
        has_input = bool(self._messages.events() & _POLLIN)
        self._messages.is_drained = not has_input
        return has_input

    def wait(self, bell: Doorbell, timeout_ms: float | None, busy_ns: int) -> None:
        """Spin for `busy_ns`, then sleep until a message, a change of connections, `bell`, or
        `timeout_ms`.

        A query of libzmq's events costs two system calls or more. It is made only if the socket may
        hold messages, and the next `try_receive` makes it only if the descriptor was readable.
        """
        self._is_quiet = False
        if not self._messages.is_drained and self.has_input():
            bell.clear()
            return
        if self._poll is None or self._poll_resting is None:
            self._poll, self._poll_resting = self._pollers(bell)
        poll = self._poll
        rest_ns = self._monitor.had_events_ns + MONITOR_REST_NS - time.monotonic_ns()
        if rest_ns > 0:
            poll, rest_ms = self._poll_resting, -(-rest_ns // 1_000_000)
            timeout_ms = rest_ms if timeout_ms is None else min(timeout_ms, rest_ms)
        found, is_sweep_due = self._pause.sleep(poll, timeout_ms, busy_ns)
        readable = [fd for fd, _ in found]
        self._is_quiet = self.fd not in readable
        if is_sweep_due or self.monitor_fd in readable:
            self.watch_at_ns = 0
        if bell.fd in readable:
            bell.clear()

    def _pollers(self, bell: Doorbell) -> tuple[select.poll, select.poll]:
        """Polls of all descriptors that end a sleep, and of all but the monitor's."""
        polls = select.poll(), select.poll()
        others = [self.fd, bell.fd, *([] if self.zap is None else [self.zap.fd])]
        for poll, descriptors in zip(polls, ([self.monitor_fd, *others], others), strict=True):
            for fd in descriptors:
                poll.register(fd, select.POLLIN)
        return polls

    # ---- connections -----------------------------------------------------------------------------

    def shaken(self, identity: bytes, credit: Credit | None) -> None:
        """Record that a session was opened for `identity` with this credit, or dropped (None)."""
        self._peers.shaken(identity, credit)

    def claim(self, identity: bytes) -> Claim | None:
        """Return what ZeroMQ has checked about a client. None: nothing."""
        peer = self._peers.by_identity.get(identity)
        return None if peer is None else peer.claim

    def peer_address(self, identity: bytes) -> str:
        peer = self._peers.by_identity.get(identity)
        if peer is None:
            return ""
        from netfront.socket.peer_address import address_of_peer  # only for an audit log

        try:
            return address_of_peer(peer.fd)
        except OSError:  # the connection has ended
            return ""

    def close_peer(self, identity: bytes, reason: str) -> None:
        """Close a connection at the sweep after the next, when its last messages
        have had time to leave.
        """
        self._condemned.condemn(identity, reason)

    def _is_connected(self, identity: bytes) -> bool:
        """True if libzmq has a connection with this identity. Only a message to it tells: a push
        that allows nothing.
        """
        self._messages.is_drained = False
        try:
            self._messages.send([identity, *_PROBE])
        except zmq.ZMQError as error:
            return error.errno == zmq.EAGAIN  # its queue is full: it takes nothing
        return True

    def watch(self, now_ns: int) -> Watched:
        """Update connections that opened and closed, and check what they cost."""
        self.watch_at_ns = now_ns + SWEEP_INTERVAL_NS  # also when what follows fails
        self._read_monitor()
        may_have_more = not self.watch_at_ns
        peers = self._peers
        if now_ns >= self._sweep_at_ns:
            self._sweep_at_ns = now_ns + SWEEP_INTERVAL_NS
            self._io_thread_slice.sample(now_ns, self._moved + self._sender.sent_pages)
            self._pause.begin_sweep()
            self._sender.settle_some(256, now_ns)
            self._condemned.sweep(self._is_connected)
            self._costs.sweep(
                now_ns, lambda: self._empty_count > self._empty_at_check and not self.has_input()
            )
            self._empty_at_check = self._empty_count
            self._pause.end_sweep(
                now_ns, len(peers), self._costs.is_settled and not self._condemned
            )
        if now_ns >= self._relisten_ns:
            self._relisten_ns = NEVER_NS
            peers.on_room_available()
        ended = peers.drain_ended(now_ns, self._empty_count)
        sweeps = len(peers) and not self._pause.is_paused
        self.watch_at_ns = min(self._sweep_at_ns if sweeps else NEVER_NS, self._relisten_ns)
        if may_have_more:
            self.watch_at_ns = 0
        elif peers.has_ended:
            self.watch_at_ns = min(self.watch_at_ns, now_ns + SWEEP_INTERVAL_NS // 5)
        closed, self._reported_closed = (
            peers.closed_count - self._reported_closed,
            peers.closed_count,
        )
        return Watched(ended, closed)

    def _read_monitor(self) -> None:
        """Read the monitor's pending events."""
        # A closed connection's last messages are read only after the socket was found empty
        # following its end.
        self._is_quiet = False
        self._now_ns = self._sender.now_ns = time.monotonic_ns()
        read = self._monitor.read(self._peers, self._now_ns, self._empty_count)
        if read.has_more:
            self.watch_at_ns = 0
        if read.failure:
            self._make_room(read.failure)

    def _make_room(self, reason: str) -> None:
        """Close connections when no descriptor is free.

        Otherwise libzmq retries accepting without a pause, and log files cannot be opened. Fewer
        connections are kept for a while. Unbinding would close all existing ones.
        """
        if self._relisten_ns == NEVER_NS:
            logger.error("accept_failed error=%r", reason)
            self._relisten_ns = self._now_ns + RELISTEN_NS
        self._peers.make_room(SPARE_DESCRIPTORS)

    def close(self) -> None:
        """Send queued messages for at most a second, then close. Unix sockets are unlinked."""
        self._read_monitor()
        self._monitor.close()
        self._messages.close()
        self.socket.close()
        if self.zap is not None:
            self.zap.close()
        self._context.term()
        self._own_sockets.close()
        for path in self._socket_paths:
            if os.path.exists(path):
                os.unlink(path)
