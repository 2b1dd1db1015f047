"""Peers: each Kafka connection is one client of this process's front, without a socket between.

The front (`netfront.front`) reads their requests from `PeerTransport` as it reads ZeroMQ's, and
responds to it. So sessions, credit, produce, fetch, look-ups and forwarding are the front's own.

Owner: one gateway.

Invariants:
- A peer shakes hands before its first request, and again after its session was dropped.
- A peer sends batches within its credit (`Peer.has_credit`).
- The tasks of a peer that wait for credit are served in order. The front knows of the first one.
- The task that waits for a fetch reads the batches before the buffer is used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from netfront.kafka.exchange.waiter import Waiter
from netfront.socket.flow_control import Credit
from netfront.socket.send_buffers import SendBuffers
from netfront.socket.transport import Watched
from shm.runtime.timing_wheel import NEVER_NS
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.format.crc32c import Readable
from tailrace.protocol import credit_messages, handshake_messages
from tailrace.protocol.frame import (
    API_VERSIONS,
    PUSH_CORRELATION_ID,
    Api,
    decode_response_header,
    encode_request,
)

if TYPE_CHECKING:
    from netfront.socket.zap import Claim

UNSENT_MAX_BYTES = 64 << 20
"""Bytes of responses to all connections above which the front sends no batches."""
_VERSIONS = {str(int(api)): list(span) for api, span in API_VERSIONS.items()}


class Answer(NamedTuple):
    """The front's response."""

    code: ErrorCode
    body: Sequence[Readable]

    def json(self) -> dict[str, Any]:
        """The body of a response in JSON."""
        found: dict[str, Any] = orjson.loads(bytes(self.body[0])) if self.body else {}
        return found

    @property
    def sentence(self) -> str:
        """The sentence of an error."""
        return str(self.json().get("message", "")) if self.code is not ErrorCode.OK else ""


_SESSION_LOST = Answer(ErrorCode.SESSION_UNKNOWN, ())


class Peer:
    """One client of the front."""

    def __init__(
        self,
        transport: PeerTransport,
        number: int,
        client_id: str,
        claim: Claim | None = None,
        address: str = "",
    ) -> None:
        """`claim`: who has logged in; None: the appliance has no users."""
        self.identity = number.to_bytes(8, "big")
        self.client_id = client_id
        self.claim = claim
        self.address = address
        self.unsent_bytes: Callable[[], int] = lambda: 0
        """Bytes of responses that its connection has not sent."""
        self.on_refused: Callable[[str], None] = lambda _reason: None
        """Called when the front does not serve it any more, with the reason."""
        self.received_bytes = 0
        """Bytes of fetched batches, as FETCH reports them."""
        self.is_shaken = False
        self._transport = transport
        self._correlation_id = 0
        self._handshake_id = 0
        self._waiting: dict[int, Waiter] = {}
        self._credit_limit = 0
        self._sent_bytes = 0
        self._credit_requests: deque[tuple[int, Waiter]] = deque()

    def ask(self, api: Api, body: Sequence[Readable], version: int | None = None) -> Waiter:
        """Send a request to the front; the waiter gets an Answer."""
        waiter = Waiter()
        self._waiting[self._send(api, body, version)] = waiter
        return waiter

    def ask_json(self, api: Api, value: dict[str, Any], version: int | None = None) -> Waiter:
        """Send a request with a JSON body."""
        return self.ask(api, [orjson.dumps(value)], version)

    def send_unanswered(self, api: Api, body: Sequence[Readable]) -> None:
        """Send a request that has no response: PRODUCE with acks=0."""
        self._send(api, body, None)

    def _send(self, api: Api, body: Sequence[Readable], version: int | None) -> int:
        self.shake()
        if api == Api.PRODUCE:
            self._sent_bytes += sum(map(len, body[1:]))
        return self._put(api, body, version or API_VERSIONS[api][1])

    def shake(self) -> None:
        """Open a session with the front, if there is none."""
        if not self.is_shaken:
            self.is_shaken = True
            self._credit_limit = self._sent_bytes = self.received_bytes = 0
            hello = {
                "versions": _VERSIONS,
                "client_id": self.client_id[: handshake_messages.CLIENT_ID_MAX],
            }
            self._handshake_id = self._put(Api.HANDSHAKE, [orjson.dumps(hello)], 1)

    def _put(self, api: Api, body: Sequence[Readable], version: int) -> int:
        self._correlation_id += 1
        frames = encode_request(api, version, self._correlation_id, body)
        self._transport.requests.append([self.identity, *frames])  # type: ignore[list-item]
        return self._correlation_id

    # ---- credit ----------------------------------------------------------------------------------

    def has_credit(self, byte_count: int) -> bool:
        """True if so many bytes of batches may be sent now."""
        return self.is_shaken and self._sent_bytes + byte_count <= self._credit_limit

    def ask_for_credit(self, byte_count: int) -> Waiter:
        """Wait until `byte_count` bytes may be sent, or the session is dropped."""
        waiter = Waiter()
        self._credit_requests.append((byte_count, waiter))
        if len(self._credit_requests) == 1:
            self._ask_for_first()
        return waiter

    def _ask_for_first(self) -> None:
        self._send(Api.CREDIT, [credit_messages.encode_credit(self._credit_requests[0][0])], None)

    def _set_credit(self, limit: int) -> None:
        self._credit_limit = limit
        requests = self._credit_requests
        first = requests[0] if requests else None
        while requests and self.has_credit(requests[0][0]):
            requests.popleft()[1].complete()  # its task sends now, and uses the credit
        if requests and requests[0] is not first:
            self._ask_for_first()

    # ---- responses -------------------------------------------------------------------------------

    def receive(self, frames: Sequence[Readable]) -> None:
        """Take a response or a push."""
        header = decode_response_header(frames[0])
        if header.error != ErrorCode.SESSION_UNKNOWN:
            self._set_credit(header.credit_limit)
        if header.correlation_id == PUSH_CORRELATION_ID:
            return
        if header.correlation_id == self._handshake_id and header.error != ErrorCode.OK:
            self.on_refused(Answer(code_of(header.error), frames[1:]).sentence)
            return
        waiter = self._waiting.pop(header.correlation_id, None)
        if waiter is not None:
            waiter.complete(Answer(code_of(header.error), frames[1:]))

    def drop(self) -> None:
        """Answer what waits: the session has ended."""
        self.is_shaken = False
        waiting, self._waiting = self._waiting, {}
        requests, self._credit_requests = self._credit_requests, deque()
        for _, request in requests:
            request.complete()
        for waiter in waiting.values():
            waiter.complete(_SESSION_LOST)


class PeerTransport:
    """The front's transport (`netfront.socket.transport.Transport`) over peers."""

    def __init__(self) -> None:
        self.requests: deque[list[bytes]] = deque()
        self._peers: dict[bytes, Peer] = {}
        self._number = 0
        self._ended: list[bytes] = []
        self._buffers = SendBuffers(kept_max=2)
        self.unsent_of_all: Callable[[], int] = lambda: 0

    def open(self, client_id: str, claim: Claim | None = None, address: str = "") -> Peer:
        """A new client of the front."""
        self._number += 1
        peer = Peer(self, self._number, client_id, claim, address)
        self._peers[peer.identity] = peer
        return peer

    def close(self, peer: Peer) -> None:
        """End a client. Its requests are not answered any more."""
        if self._peers.pop(peer.identity, None) is not None and peer.is_shaken:
            self._ended.append(peer.identity)

    # ---- Transport -------------------------------------------------------------------------------

    def try_receive(self) -> list[bytes] | None:
        """Return the oldest request."""
        return self.requests.popleft() if self.requests else None

    def try_send(self, identity: bytes, frames: Sequence[Readable]) -> bool:
        """Give a response to its peer."""
        peer = self._peers.get(identity)
        if peer is None:
            return False
        peer.receive([bytes(frame) for frame in frames])
        return True

    def try_send_buffer(
        self, identity: bytes, frames: Sequence[Readable], data: memoryview
    ) -> bool:
        """Give a response with batches to its peer, and take the buffer back."""
        peer = self._peers.get(identity)
        buffer = data.obj
        if peer is not None:
            peer.received_bytes += len(data)
            peer.receive([bytes(frames[0]), *frames[1:], data])
        if isinstance(buffer, bytearray):
            self._buffers.give_back(buffer)
        return peer is not None

    def new_buffer(self, size: int) -> bytearray:
        """Return a buffer of at least `size` bytes."""
        return self._buffers.take(size)

    def unsent_bytes(self, identity: bytes) -> int:
        """Return the response bytes that this peer's connection holds."""
        peer = self._peers.get(identity)
        return peer.unsent_bytes() if peer is not None else 0

    def unsent_total(self) -> int:
        """Return the response bytes that all connections hold."""
        return self.unsent_of_all()

    def shaken(self, identity: bytes, credit: Credit | None) -> None:
        """Note that a session was opened, or dropped (None)."""
        peer = self._peers.get(identity)
        if peer is not None and credit is None and peer.is_shaken:
            peer.drop()

    def peer_address(self, identity: bytes) -> str:
        """The address of a client, for the audit log."""
        peer = self._peers.get(identity)
        return "" if peer is None else peer.address

    def close_peer(self, identity: bytes, reason: str) -> None:
        """End a peer that the front serves no more: its user is not let in any more."""
        peer = self._peers.get(identity)
        if peer is not None:
            peer.on_refused(reason)

    def claim(self, identity: bytes) -> Claim | None:
        """The user of the peer's connection. None: it has ended, or the appliance has no users."""
        peer = self._peers.get(identity)
        return None if peer is None else peer.claim

    def watch(self, now_ns: int) -> Watched:
        """Return the peers that have ended."""
        ended, self._ended = self._ended, []
        return Watched(ended, 0)

    @property
    def watch_at_ns(self) -> int:
        """Time of the next `watch` call."""
        return 0 if self._ended else NEVER_NS
