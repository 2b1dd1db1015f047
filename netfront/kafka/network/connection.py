"""Connection: one socket of a Kafka client, cut into requests and responses.

    request     size i32 | api i16 | version i16 | correlation id i32 | client id | body
    response    size i32 | correlation id i32 | body

Owner: one gateway.

Invariants:
- A client that must log in has small requests until it has.
- A request's size is checked before memory is taken for it: when its 4 bytes are there, and for
  its API when these are.
- Responses leave in the order of their requests.
- A connection that has FRAMES_MAX requests or UNSENT_HIGH_BYTES of responses is not read.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import TYPE_CHECKING

from netfront.kafka.exchange.peers import Peer
from netfront.kafka.exchange.waiter import Task
from shm.rights.kafka_listeners import PLAINTEXT

if TYPE_CHECKING:
    from netfront.kafka.login.login import Login
    from netfront.socket.zap import Claim

PRODUCE = 0
PRODUCE_MAX_BYTES = 32 << 20
REQUEST_MAX_BYTES = 4 << 20
"""Largest request, of PRODUCE and of any other API."""
STRANGER_MAX_BYTES = 64 << 10
"""Largest request of a client that has not logged in."""
FRAMES_MAX = 32
FRAME_MIN_BYTES = 8
TLS_HANDSHAKE = 0x16
"""First byte of a client that begins TLS."""
UNSENT_HIGH_BYTES = 4 << 20
READ_BYTES = 256 << 10
READ_AT_ONCE_BYTES = 2 << 20
PIECES_AT_ONCE = 64
_SIZE = struct.Struct(">i")
_SIZE_AND_API = struct.Struct(">ih")


class FrameError(ValueError):
    """Bytes that are no request: the connection is closed."""


class Exchange:
    """One request, from its arrival to its response."""

    __slots__ = ("api", "correlation_id", "response", "started_ns", "task", "version")

    def __init__(self, api: int, version: int, correlation_id: int, started_ns: int) -> None:
        self.api = api
        self.version = version
        self.correlation_id = correlation_id
        self.started_ns = started_ns
        self.response: bytes | bytearray | None = None
        """None until it is known; empty for a request without a response."""
        self.task: Task | None = None


class Connection:
    """A client's socket."""

    reads_records = False
    """True if a read may return less than there is: a record of TLS."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        now_ns: int,
        login: Login | None = None,
        protocol: str = PLAINTEXT,
    ) -> None:
        """`login`: the client must log in by SASL. `protocol`: that of its listener."""
        self.sock = sock
        self.protocol = protocol
        self.login = login
        self.claim: Claim | None = None
        """The client's user by its certificate; `login` has the one who has logged in."""
        self.fd = sock.fileno()
        self.address = address
        host, port = sock.getsockname()[:2]
        self.local = str(host), int(port)
        """The address that the client connected to."""
        self.peer: Peer | None = None
        self.frames: deque[bytes] = deque()
        self.exchanges: deque[Exchange] = deque()
        self.is_blocked = False
        """True while a produce waits for credit: no later request is begun."""
        self.is_muted = False
        """True while its user is beyond a rate: it begins no request."""
        self.is_closed = False
        self.is_leaving = False
        """True if it is closed when its responses are sent, and begins no request."""
        self.is_ended = False
        """True once the client has sent everything; it is closed when that is answered."""
        self.is_reading = True
        self.is_writing = False
        self.last_active_ns = now_ns
        self.incomplete_since_ns = 0
        """Time when an incomplete request began; 0: there is none."""
        self.unsent_bytes = 0
        self.retained_bytes = 0
        """Bytes of responses that have not left as a whole: each keeps all its memory until then.
        """
        self.counted_bytes = 0
        """Those of `retained_bytes` that the listener has counted."""
        self.sent_count = 0
        """Responses that have left as a whole."""
        self.unserved_bytes = 0
        """Bytes of requests that have arrived and are not begun."""
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()

    # ---- in --------------------------------------------------------------------------------------

    @property
    def is_stranger(self) -> bool:
        """True until the client is let in: its handshake of TLS is done, and it has logged in."""
        return self.login is not None and self.login.claim is None

    @property
    def is_write_due(self) -> bool:
        """True if it waits until the socket takes bytes."""
        return bool(self.unsent_bytes)

    def _receive(self, scratch: memoryview) -> int:
        """Read some bytes. Raises BlockingIOError, OSError."""
        return self.sock.recv_into(scratch)

    def _transmit(self, pieces: list[memoryview]) -> int:
        """Send some bytes of the first pieces. Raises BlockingIOError, OSError."""
        return self.sock.sendmsg(pieces)

    @property
    def is_full(self) -> bool:
        """True if it has as much as may wait."""
        return len(self.frames) >= FRAMES_MAX or self.unsent_bytes >= UNSENT_HIGH_BYTES

    def read(self, scratch: memoryview, now_ns: int) -> int:
        """Read what there is. Return the number of bytes, or -1 at the end.

        Raises: FrameError, OSError.
        """
        total = 0
        while total < READ_AT_ONCE_BYTES and not self.is_full:
            try:
                count = self._receive(scratch)
            except BlockingIOError:
                break
            if not count:
                return -1
            total += count
            self.feed(scratch[:count], now_ns)
            if count < len(scratch) and not self.reads_records:
                break
        if total:
            self.last_active_ns = now_ns
        return total

    def feed(self, data: memoryview, now_ns: int) -> None:
        """Take bytes of the stream and cut whole requests out of it. Raises FrameError."""
        if self._incoming:
            self._incoming += data
            with memoryview(self._incoming) as view:
                used = self._cut(view)
            if used:
                del self._incoming[:used]
        else:
            used = self._cut(data)
            self._incoming += data[used:]
        self.unserved_bytes = sum(map(len, self.frames)) + len(self._incoming)
        if not self._incoming:
            self.incomplete_since_ns = 0
        elif used or not self.incomplete_since_ns:
            self.incomplete_since_ns = now_ns

    def _cut(self, view: memoryview) -> int:
        at, end = 0, len(view)
        while end - at >= _SIZE.size:
            size = _SIZE.unpack_from(view, at)[0]
            is_token = self.login is not None and self.login.is_raw
            if not (0 if is_token else FRAME_MIN_BYTES) <= size <= PRODUCE_MAX_BYTES:
                if size >> 24 == TLS_HANDSHAKE:
                    raise FrameError("the client begins TLS, and this address has none")
                raise FrameError(
                    f"a request of {size} bytes; {FRAME_MIN_BYTES} to {PRODUCE_MAX_BYTES} are "
                    "allowed"
                )
            if size > STRANGER_MAX_BYTES and self.is_stranger:
                raise FrameError(
                    f"a request of {size} bytes before the login; at most {STRANGER_MAX_BYTES} are "
                    "allowed"
                )
            if end - at >= _SIZE_AND_API.size and size > REQUEST_MAX_BYTES:
                api = _SIZE_AND_API.unpack_from(view, at)[1]
                if api != PRODUCE:
                    raise FrameError(
                        f"a request of {size} bytes of API {api}; at most {REQUEST_MAX_BYTES} are "
                        "allowed"
                    )
            if end - at < _SIZE.size + size:
                break
            at += _SIZE.size
            self.frames.append(bytes(view[at : at + size]))
            at += size
        return at

    @property
    def is_finished(self) -> bool:
        """True if everything that the client has sent is answered."""
        return not (self.frames or self.exchanges or self.unsent_bytes)

    def take_frame(self) -> bytes:
        """Return the oldest request."""
        frame = self.frames.popleft()
        self.unserved_bytes -= len(frame)
        return frame

    # ---- out -------------------------------------------------------------------------------------

    def queue_responses(self) -> int:
        """Queue the responses that may leave: those of the oldest requests. Return how many."""
        count = 0
        while self.exchanges and self.exchanges[0].response is not None:
            response = self.exchanges.popleft().response
            count += 1
            if response:
                self._outgoing.append(memoryview(response))
                self.unsent_bytes += len(response)
                self.retained_bytes += len(response)
        return count

    def send(self) -> None:
        """Send what the socket takes. Raises OSError."""
        while self._outgoing:
            pieces = [self._outgoing[at] for at in range(min(len(self._outgoing), PIECES_AT_ONCE))]
            try:
                sent = self._transmit(pieces)
            except BlockingIOError:
                return
            self.unsent_bytes -= sent
            while sent:
                first = self._outgoing[0]
                if sent < len(first):
                    self._outgoing[0] = first[sent:]
                    return
                sent -= len(first)
                self._outgoing.popleft()
                self.retained_bytes -= memoryview(first.obj).nbytes
                self.sent_count += 1

    def close(self) -> None:
        """Close the socket and end the tasks of its requests: all, also when one fails to end."""
        self.is_closed = True
        self.sock.close()
        self._outgoing.clear()
        self._incoming.clear()
        self.frames.clear()
        self.unsent_bytes = self.unserved_bytes = self.retained_bytes = 0
        exchanges, self.exchanges = self.exchanges, deque()
        failed: Exception | None = None
        for exchange in exchanges:
            try:
                if exchange.task is not None:
                    exchange.task.close()
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed
