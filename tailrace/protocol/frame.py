"""Frame 1 of every message: a fixed binary header, and the limits that hold before anything is allocated.

A request is [RequestHeader, body frames...] from a DEALER to a ROUTER; a response is [ResponseHeader, body frames...]. ZeroMQ keeps frames whole, so there is
no stream to resynchronise: a message that does not parse is answered with an error and forgotten.

Layout (little endian):

    request   0 magic u32 | 4 api u16 | 6 version u16 | 8 correlation_id u64 | 16 flags u32 | 20 body_length u32               (24 bytes)
    response  0 magic u32 | 4 api u16 | 6 version u16 | 8 correlation_id u64 | 16 error u16 | 18 flags u16 | 20 body_length u32
              24 credit_limit u64 | 32 generation u32 | 36 reserved u32                                                    (40 bytes)

Invariants: `body_length` is the sum of the body frames' lengths. `credit_limit` is absolute: how many bytes of produce batches this connection may have sent
in all. `generation` is the front's: another one than the handshake's means that the front restarted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tailrace.formats.checksum import Readable
from tailrace.protocol.errors import ErrorCode

REQUEST_MAGIC = 0x51525254  # "TRRQ"
RESPONSE_MAGIC = 0x53525254  # "TRRS"
REQUEST_HEADER_BYTES = 24
RESPONSE_HEADER_BYTES = 40
FRAMES_MAX = 3
"""Of a message, but for a PRODUCE request of version 2."""
PRODUCE_FRAMES_MAX = 8
"""Frames with batches of a PRODUCE request of version 2."""
JSON_MAX_BYTES = 1 << 20
BATCH_CEILING_BYTES = 64 << 20
"""No topic may allow larger batches; ZeroMQ drops a connection that sends a larger frame before reading it."""
PUSH_CORRELATION_ID = 0
"""Responses that answer no request (credit raised) carry this."""

_REQUEST = struct.Struct("<IHHQII")
_RESPONSE = struct.Struct("<IHHQHHIQII")
assert _REQUEST.size == REQUEST_HEADER_BYTES
assert _RESPONSE.size == RESPONSE_HEADER_BYTES


class Api(IntEnum):
    """Numbers of requests; never reused."""

    HANDSHAKE = 1
    PING = 2
    PRODUCE = 3
    FETCH = 4
    METADATA = 5
    CREATE_TOPICS = 6
    DELETE_TOPICS = 7
    ALTER_TOPICS = 8
    INIT_PRODUCER_ID = 9
    LIST_OFFSETS = 10
    DESCRIBE_CLUSTER = 11
    CREDIT = 12
    DELETE_RECORDS = 13
    LEASE_OFFSETS = 14
    LIST_DELAYS = 15
    CHANGE_DELAYS = 16
    DESCRIBE_DELAYS = 17
    GROUP_HEARTBEAT = 18
    COMMIT_OFFSETS = 19
    FETCH_OFFSETS = 20
    LIST_GROUPS = 21
    DESCRIBE_GROUP = 22
    DELETE_GROUPS = 23
    ALTER_GROUP_OFFSETS = 24
    SHARE_ACQUIRE = 25
    SHARE_ACKNOWLEDGE = 26


API_VERSIONS: dict[int, tuple[int, int]] = {**dict.fromkeys(Api, (1, 1)), Api.PRODUCE: (1, 2), Api.FETCH: (2, 2)}
"""Lowest and highest version of each API that this build speaks. HANDSHAKE's JSON is version 1 for ever."""


def frames_max(api: int, version: int) -> int:
    """How many frames a request may have, its header with them."""
    return 2 + PRODUCE_FRAMES_MAX if api == Api.PRODUCE and version >= 2 else FRAMES_MAX


class WireError(ValueError):
    """A message that is not of this protocol; `code` says what to answer."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclass(slots=True)
class RequestHeader:
    """Frame 1 of a request. `body_length`: bytes of the frames behind it."""

    api: int
    version: int
    correlation_id: int
    body_length: int
    flags: int = 0

    def to_bytes(self) -> bytes:
        """The frame's 24 bytes."""
        return _REQUEST.pack(REQUEST_MAGIC, self.api, self.version, self.correlation_id, self.flags, self.body_length)


@dataclass(slots=True)
class ResponseHeader:
    """Frame 1 of a response. `error`: an ErrorCode's number; `credit_limit`, `generation`: see the module's docstring."""

    api: int
    version: int
    correlation_id: int
    error: int
    body_length: int
    credit_limit: int
    generation: int
    flags: int = 0

    def to_bytes(self) -> bytes:
        """The frame's 40 bytes."""
        return _RESPONSE.pack(
            RESPONSE_MAGIC, self.api, self.version, self.correlation_id, self.error, self.flags, self.body_length,
            self.credit_limit, self.generation, 0,
        )  # fmt: skip


def encode_request(api: int, version: int, correlation_id: int, body: Sequence[Readable] = ()) -> list[Readable]:
    """The frames of a request."""
    return [_REQUEST.pack(REQUEST_MAGIC, api, version, correlation_id, 0, sum(map(len, body))), *body]


def encode_response(
    api: int, version: int, correlation_id: int, error: int, credit_limit: int, generation: int, body: Sequence[Readable] = ()
) -> list[Readable]:
    """The frames of a response."""
    length = sum(map(len, body))
    return [_RESPONSE.pack(RESPONSE_MAGIC, api, version, correlation_id, error, 0, length, credit_limit, generation, 0), *body]


def decode_request_header(frame: Readable) -> RequestHeader:
    """Parse frame 1 of a request. Raises WireError (the api number, where it could be read, is for the error's answer)."""
    if len(frame) != REQUEST_HEADER_BYTES:
        raise WireError(ErrorCode.MALFORMED_REQUEST, f"a request header has {REQUEST_HEADER_BYTES} bytes, this one {len(frame)}")
    magic, api, version, correlation_id, flags, body_length = _REQUEST.unpack(frame)
    if magic != REQUEST_MAGIC:
        raise WireError(ErrorCode.MALFORMED_REQUEST, f"request magic is 0x{magic:08x}, expected 0x{REQUEST_MAGIC:08x}")
    if flags:
        raise WireError(ErrorCode.MALFORMED_REQUEST, f"unknown request flags 0x{flags:x}")
    return RequestHeader(api, version, correlation_id, body_length, flags)


def undecodable_request(frame: Readable) -> RequestHeader | None:
    """What the fields of a frame 1 say that `decode_request_header` has refused, so that its sender can be answered; None where its length is wrong, and
    nothing in it can be taken for a field.
    """
    if len(frame) != REQUEST_HEADER_BYTES:
        return None
    _, api, version, correlation_id, flags, body_length = _REQUEST.unpack(frame)
    return RequestHeader(api, version, correlation_id, body_length, flags)


def response_fields(frame: Readable) -> tuple[int, ...]:
    """What frame 1 of a response holds, in its order, magic and reserved with them. Raises WireError."""
    if len(frame) != RESPONSE_HEADER_BYTES:
        raise WireError(ErrorCode.MALFORMED_REQUEST, f"a response header has {RESPONSE_HEADER_BYTES} bytes, this one {len(frame)}")
    fields = _RESPONSE.unpack(frame)
    if fields[0] != RESPONSE_MAGIC:
        raise WireError(ErrorCode.MALFORMED_REQUEST, f"response magic is 0x{fields[0]:08x}, expected 0x{RESPONSE_MAGIC:08x}")
    return fields


def decode_response_header(frame: Readable) -> ResponseHeader:
    """Parse frame 1 of a response. Raises WireError."""
    _, api, version, correlation_id, error, flags, body_length, credit_limit, generation, _ = response_fields(frame)
    return ResponseHeader(api, version, correlation_id, error, body_length, credit_limit, generation, flags)


def check_body(body_length: int, body: Sequence[Readable]) -> None:
    """Raise WireError unless the body frames have the length that the header claims."""
    actual = sum(map(len, body))
    if actual != body_length:
        raise WireError(ErrorCode.MALFORMED_REQUEST, f"the header claims {body_length} body bytes, {actual} came")
