"""The ZeroMQ socket of a front, behind a few methods, so that the front itself can be stepped without one.

ROUTER with ROUTER_MANDATORY: a message to a client that is gone, or whose queue is full, is refused here instead of dropped in silence. What a connection
costs is kept in `peers`; libzmq tells of connections that come and go through a monitor socket.

Owner: one front. Invariants: a buffer is used again only when libzmq has let go of it, in any order over connections; `watch` is called when
`watch_at_ns` has come, and whenever the monitor's descriptor is readable: libzmq's thread waits while the monitor is not read.
"""

from __future__ import annotations

import logging
import os
import select
import struct
import time
from collections.abc import Sequence

import zmq

from netfront.credits import Credit
from netfront.io_slice import IoSlice, io_threads, set_slice_ns
from netfront.message_socket import LENT_FROM_BYTES, MessageSocket, taken_frame
from netfront.peer_sockets import KernelPeerSockets, PeerSockets
from netfront.peers import LOOK_NS, MESSAGE_COST_BYTES, UNSENT_PEER_MAX, Limits, Peer, Peers
from netfront.transport import Watched
from shm.doorbell import Doorbell, look_then_sleep
from tailrace.formats.checksum import Readable

logger = logging.getLogger(__name__)

QUEUE_MESSAGES = 4096
ZMTP_HANDSHAKE_MS = 10_000
DEAD_HOST_S = 30
KEEPALIVE_S = 5
BUFFER_CLASSES = (64 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20)
POOLED_MAX_BYTES = 32 << 20
"""Of free buffers, for each class (one buffer at least)."""
PARTS_MAX = 16
"""A message of more parts is no request, nor a mistake: its sender is closed."""
DISCARDED_AT_ONCE = 2048
SPARE_DESCRIPTORS = 8
"""Of connections that are closed when there are none."""
EVENTS_AT_ONCE = 2_100
"""More than the monitor holds: 1,000 messages on each side."""
RELISTEN_NS = 500_000_000
NEVER_NS = 1 << 63
_EVENTS, _POLLIN, _RCVMORE, _NOBLOCK, _SRCFD = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE), int(zmq.NOBLOCK), int(zmq.SRCFD)
_SEND_FIRST = int(zmq.NOBLOCK | zmq.SNDMORE)
_ACCEPTED, _DISCONNECTED, _ACCEPT_FAILED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED), int(zmq.EVENT_ACCEPT_FAILED)
"""As plain numbers: an operation on members of an enumeration is Python code."""
_EVENT = struct.Struct("=HI")


class AddressInUseError(RuntimeError):
    """Something else listens there."""


def _begin_zero_copy(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Send a message from its own memory, to nobody else. At its first pyzmq imports a module and starts a thread with sockets, for which later there may
    be no descriptors: the front would end.
    """
    with context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.copy_threshold = 0
        one.bind("inproc://zero-copy")
        other.connect("inproc://zero-copy")
        sent = one.send(b"x", copy=False, track=True)
        other.recv()
        assert sent is not None
        sent.wait()


def _look_for_dead_hosts(socket: zmq.Socket[bytes]) -> None:
    """Connections whose other end says nothing for DEAD_HOST_S, not even as a kernel, are ended.

    Not by ZMTP's heartbeats: when a peer goes whose messages fill its queue here, libzmq 4.3.5 keeps its connection until there is room, writes the next
    heartbeat into it, and aborts the process (`!_io_error`, libzmq's issue 4841).
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, DEAD_HOST_S // KEEPALIVE_S - 1)
    socket.setsockopt(zmq.TCP_MAXRT, DEAD_HOST_S * 1000)


class Router:
    """A bound socket, its connections, and the buffers that are being sent from."""

    def __init__(self, addresses: list[str], message_max_bytes: int, limits: Limits, sockets: PeerSockets | None = None) -> None:
        """Bind to all `addresses`. `message_max_bytes`: the largest frame that is taken. Raises AddressInUseError."""
        self._context = zmq.Context()
        socket = self.socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, message_max_bytes)
        socket.setsockopt(zmq.HANDSHAKE_IVL, ZMTP_HANDSHAKE_MS)
        _look_for_dead_hosts(socket)
        socket.copy_threshold = 0
        monitor_address = f"inproc://monitor-{id(self)}"
        socket.monitor(monitor_address, _ACCEPTED | _DISCONNECTED | _ACCEPT_FAILED)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.connect(monitor_address)
        self.monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self.fd = int(socket.getsockopt(zmq.FD))
        self._messages = MessageSocket(socket)
        self._poll: select.poll | None = None
        self.port = 0
        self._socket_paths = [address.removeprefix("ipc://") for address in addresses if address.startswith("ipc:///")]
        for address in addresses:
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                raise AddressInUseError(
                    f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}. Stop what uses it, or choose another with --listen."
                ) from None
            bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
            if address.startswith("tcp://") and not self.port:
                self.port = int(bound.rpartition(":")[2])
        _begin_zero_copy(self._context)
        threads = io_threads()
        self._io_slice = IoSlice(lambda slice_ns: set_slice_ns(threads, slice_ns))
        self._moved = 0
        """Messages that came and pages of 4 KiB that came or went."""
        self._relisten_ns = NEVER_NS
        self._free: dict[int, list[bytearray]] = {size: [] for size in BUFFER_CLASSES}
        self._own_sockets = KernelPeerSockets()
        self._peers = Peers(sockets or self._own_sockets, limits)
        self._now_ns = 0
        self.watch_at_ns = 0
        self._look_at_ns = 0
        self._empty_count = 0
        """How often there was nothing to receive."""
        self._empty_at_look = 0
        self._is_quiet = False
        """Whether nothing had come when this loop's turn began."""
        self._is_drained = False
        """Whether nothing waited when the socket was last used: what comes now makes its descriptor readable."""
        self._discards = False
        self._told_closed = 0

    # ---- receiving -----------------------------------------------------------------------------------------------------------------------

    def try_receive(self) -> list[bytes] | None:
        """One whole message, identity first, or None."""
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
        messages, known = self._messages, self._peers.by_identity
        frames = messages.try_receive(known, PARTS_MAX)
        if frames is None:
            self._is_drained = True
            self._empty_count += 1
            return None
        self._is_drained = False
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
            return None if is_sure else frames  # too many for a request: an answer finds who sent it
        self._moved += 1 + (taken >> 12)
        if peer is not None:
            peer.taken += taken
        return frames

    def _receive_first(self, frames: list[bytes]) -> tuple[Peer | None, int]:
        """The rest of a message whose sender was not met yet: (the connection that it came over, its bytes on the wire)."""
        receive = self.socket.recv
        frame = receive(_NOBLOCK, False)
        peer = self._meet(frames[0], frame)
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

    def _meet(self, identity: bytes, first: zmq.Frame) -> Peer | None:
        """The connection of a first message. None: it speaks a ZMTP before 3.0 (or no ZMTP at all), of which libzmq does not tell whose messages are whose;
        without that it cannot be served, and it is closed when what it sent comes to its allowance.
        """
        self._read_monitor()  # libzmq has told of the connection before its first message
        self.watch_at_ns = 0  # the monitor's descriptor, which would have said so, is silent now
        try:
            fd = int(first.get(_SRCFD))
        except zmq.ZMQError:
            return None
        return self._peers.meet(identity, fd)

    def _discard(self) -> None:
        """Throw away the rest of a message of too many parts, a piece at a time: others wait behind it."""
        for _ in range(DISCARDED_AT_ONCE):
            if not self.socket.get(_RCVMORE):
                self._discards = False
                return
            self.socket.recv(_NOBLOCK)

    def has_input(self) -> bool:
        """Whether a message waits. Using the socket, for sending too, may have noticed it, so the descriptor alone does not tell."""
        has_input = bool(int(self.socket.get(_EVENTS)) & _POLLIN)
        self._is_drained = not has_input
        return has_input

    def wait(self, bell: Doorbell, timeout_ms: float | None, busy_ns: int) -> None:
        """Sleep until a message comes, connections have changed or `bell` rings, for at most `timeout_ms`; look for `busy_ns` first.

        Asking libzmq what waits costs two system calls or more. Here it is asked only if the socket was used since it had nothing, and the next
        `try_receive` asks only if the descriptor was readable.
        """
        self._is_quiet = False
        if not self._is_drained and self.has_input():
            bell.clear()
            return
        if self._poll is None:
            self._poll = select.poll()
            for fd in (self.fd, self.monitor_fd, bell.fd):
                self._poll.register(fd, select.POLLIN)
        readable = [fd for fd, _ in look_then_sleep(self._poll, timeout_ms, busy_ns, time.monotonic_ns)]
        self._is_quiet = self.fd not in readable
        if self.monitor_fd in readable:
            self.watch_at_ns = 0
        if bell.fd in readable:
            bell.clear()

    # ---- sending -------------------------------------------------------------------------------------------------------------------------

    def try_send(self, identity: bytes, frames: Sequence[Readable]) -> bool:
        """Queue a message; False when the client is gone or takes nothing."""
        self._is_drained = False
        peer = self._peers.by_identity.get(identity)
        if peer is None or not self._peers.wants_mark(peer, sum(map(len, frames)) + MESSAGE_COST_BYTES):
            try:
                self._messages.send([identity, *frames])
            except zmq.ZMQError as error:
                return self._not_sent(peer, error)
            return True
        return self._send_marked(peer, [identity, *frames[:-1]], frames[-1], None)

    def try_send_buffer(self, identity: bytes, frames: Sequence[Readable], data: memoryview) -> bool:
        """Queue a message whose last frame is part of a buffer from `new_buffer`; the buffer is used again when it is sent."""
        self._is_drained = False
        self._moved += len(data) >> 12
        buffer = data.obj
        assert isinstance(buffer, bytearray)
        peer = self._peers.by_identity.get(identity)
        marked = peer is not None and self._peers.wants_mark(peer, sum(map(len, frames)) + len(data) + MESSAGE_COST_BYTES)
        if peer is not None and (marked or len(data) >= LENT_FROM_BYTES):
            return self._send_marked(peer, [identity, *frames], data, buffer)  # libzmq sends from the buffer: it is free at its mark
        try:
            self._messages.send([identity, *frames, data])  # libzmq copies: the buffer is free now
        except zmq.ZMQError as error:
            return self._not_sent(peer, error)
        finally:
            self._give_back(buffer)
        return True

    def _send_marked(self, peer: Peer, frames: Sequence[Readable], last: Readable, buffer: bytearray | None) -> bool:
        """Send `frames` and `last`, of which libzmq tells when it lets go of it; False, and the peer is closed, when too much waits for it already."""
        if peer.unsent > UNSENT_PEER_MAX:
            for free in self._peers.settle(peer, self._now_ns):
                self._give_back(free)
            if peer.unsent > UNSENT_PEER_MAX:
                self._peers.close(peer, f"it takes nothing, and {peer.unsent} bytes of answers wait for it")
                return False
        try:
            for frame in frames:
                self.socket.send(frame, _SEND_FIRST)
            tracker = self.socket.send(last, _NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            return self._not_sent(peer, error)
        assert tracker is not None
        self._peers.mark(peer, tracker, buffer, self._now_ns)
        return True

    def _not_sent(self, peer: Peer | None, error: zmq.ZMQError) -> bool:
        """False. A client that does not get one of its answers is told so by the end of its connection: it would wait for it."""
        if peer is not None and error.errno == zmq.EAGAIN:
            self._peers.close(peer, f"it takes nothing, and {QUEUE_MESSAGES} answers wait for it")
        return False

    def unsent_bytes(self, identity: bytes) -> int:
        """What libzmq still holds of answers to this client, in bytes; 0 where that is no more than a little."""
        peer = self._peers.by_identity.get(identity)
        if peer is None:
            return 0
        for free in self._peers.settle(peer, self._now_ns):
            self._give_back(free)
        return peer.unsent

    def unsent_total(self) -> int:
        """The same for all clients together, as of the last look at each."""
        return self._peers.unsent_total

    # ---- buffers -------------------------------------------------------------------------------------------------------------------------

    def new_buffer(self, size: int) -> bytearray:
        """A buffer of at least `size` bytes, with whatever was in it."""
        for buffer in self._peers.settle_some(4, self._now_ns):
            self._give_back(buffer)
        for class_size in BUFFER_CLASSES:
            if size <= class_size:
                free = self._free[class_size]
                return free.pop() if free else bytearray(class_size)
        return bytearray(size)

    def _give_back(self, buffer: bytearray) -> None:
        free = self._free.get(len(buffer))
        if free is not None and len(free) < max(1, min(8, POOLED_MAX_BYTES // len(buffer))):
            free.append(buffer)

    # ---- connections ---------------------------------------------------------------------------------------------------------------------

    def shaken(self, identity: bytes, credit: Credit | None) -> None:
        """A session was opened for `identity`, with this credit; or dropped (None)."""
        self._peers.shaken(identity, credit)

    def close_peer(self, identity: bytes, reason: str) -> None:
        """Close a connection at the next look: what it was sent last has left by then, or its client takes nothing."""
        peer = self._peers.by_identity.get(identity)
        if peer is not None:
            self._peers.condemn(peer, reason)

    def watch(self, now_ns: int) -> Watched:
        """Take in which connections have come and gone, and look at what they cost."""
        self.watch_at_ns = now_ns + LOOK_NS  # also when what follows fails
        self._read_monitor()
        may_have_more = not self.watch_at_ns
        peers = self._peers
        if now_ns >= self._look_at_ns:
            self._look_at_ns = now_ns + LOOK_NS
            self._io_slice.look(now_ns, self._moved)
            for buffer in peers.settle_some(256, now_ns):
                self._give_back(buffer)
            peers.look(now_ns, lambda: self._empty_count > self._empty_at_look and not self.has_input())
            self._empty_at_look = self._empty_count
        if now_ns >= self._relisten_ns:
            self._relisten_ns = NEVER_NS
            peers.room_is_back()
        ended = peers.take_ended(now_ns, self._empty_count)
        self.watch_at_ns = min(self._look_at_ns if len(peers) else NEVER_NS, self._relisten_ns)
        if may_have_more:
            self.watch_at_ns = 0
        elif peers.has_ended:
            self.watch_at_ns = min(self.watch_at_ns, now_ns + LOOK_NS // 5)
        closed, self._told_closed = peers.closed_count - self._told_closed, peers.closed_count
        return Watched(ended, closed)

    def _read_monitor(self) -> None:
        """Everything that libzmq had told when this was called. Not until there is nothing: without descriptors it tells of failures without end."""
        monitor = self._monitor
        self._is_quiet = False  # what a connection had sent is read only when the socket is found empty after its end was told
        failed = ""
        self._now_ns = time.monotonic_ns()
        for _ in range(EVENTS_AT_ONCE):
            if not int(monitor.get(_EVENTS)) & _POLLIN:
                break
            what, endpoint = monitor.recv_multipart(_NOBLOCK)
            event, value = _EVENT.unpack(what)
            if event == _ACCEPTED:
                self._peers.accepted(value, endpoint.startswith(b"tcp://"), self._now_ns)
            elif event == _DISCONNECTED:
                self._peers.disconnected(value, self._now_ns, self._empty_count)
            elif event == _ACCEPT_FAILED:
                failed = os.strerror(value)
        else:
            self.watch_at_ns = 0
        if failed:
            self._make_room(failed)

    def _make_room(self, reason: str) -> None:
        """No descriptor is left for new connections: libzmq would try again without a pause, and the log's files need descriptors too. For a while fewer
        connections are kept. (Unbinding would end those that there are.)
        """
        if self._relisten_ns == NEVER_NS:
            logger.error(
                "accept_failed error=%r: keeping fewer connections; lower connections.max or raise the limit of open files", reason
            )
            self._relisten_ns = self._now_ns + RELISTEN_NS
        self._peers.make_room(SPARE_DESCRIPTORS)

    def close(self) -> None:
        """Send what is queued for at most a second, then end; Unix sockets go from the file system."""
        self._read_monitor()
        self.socket.disable_monitor()
        self._monitor.close(0)
        self._messages.close()
        self.socket.close()
        self._context.term()
        self._own_sockets.close()
        for path in self._socket_paths:
            if os.path.exists(path):
                os.unlink(path)
