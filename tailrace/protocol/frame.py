"""Frame 1 of every message: a fixed binary header, and the limits checked before any allocation.

A request is [RequestHeader, body frames...] from a DEALER to a ROUTER. A response is
[ResponseHeader, body frames...]. ZeroMQ keeps frames whole, so there is no stream to resynchronise:
a message that does not parse gets an error response and is dropped.

Layout (little endian):

    request (24 bytes)
         0 magic u32 | 4 api u16 | 6 version u16 | 8 correlation_id u64 | 16 flags u32 |
        20 body_length u32
    response (40 bytes)
         0 magic u32 | 4 api u16 | 6 version u16 | 8 correlation_id u64 | 16 error u16 |
        18 flags u16 | 20 body_length u32 | 24 credit_limit u64 | 32 generation u32 |
        36 reserved u32

Invariants:
- `body_length` is the sum of the body frames' lengths.
- `credit_limit` is absolute: the total bytes of produce batches that this connection may send.
- `generation` is the front's. If it differs from the handshake's, the front has restarted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, unique

from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable

REQUEST_MAGIC = 0x51525254  # "TRRQ"
RESPONSE_MAGIC = 0x53525254  # "TRRS"
REQUEST_HEADER_BYTES = 24
RESPONSE_HEADER_BYTES = 40
FRAMES_MAX = 3
"""Most frames of a message, except for a PRODUCE request of version 2 or 3."""
PRODUCE_FRAMES_MAX = 8
"""Most frames with batches in a PRODUCE request of version 2 or 3."""
JSON_MAX_BYTES = 1 << 20
BATCH_CEILING_BYTES = 64 << 20
"""Largest batch that any topic may allow. ZeroMQ drops a connection that sends a larger frame
before reading it.
"""
PUSH_CORRELATION_ID = 0
"""Correlation id of responses without a request, which raise the credit."""

_REQUEST = struct.Struct("<IHHQII")
_RESPONSE = struct.Struct("<IHHQHHIQII")
assert _REQUEST.size == REQUEST_HEADER_BYTES
assert _RESPONSE.size == RESPONSE_HEADER_BYTES


@unique
class Api(IntEnum):
    """Numbers of requests, never reused."""

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
    INIT_TRANSACTIONS = 27
    END_TRANSACTION = 28
    LIST_TRANSACTIONS = 29
    DESCRIBE_TRANSACTION = 30
    ABORT_TRANSACTION = 31
    CREATE_BRANCHES = 32
    JOIN_TRANSACTION = 33
    DESCRIBE_CONFIGS = 36
    ALTER_CONFIGS = 37
    RELOAD_CONFIG = 38
    LIST_DELETED_TOPICS = 39
    UNDELETE_TOPICS = 40
    PURGE_TOPICS = 41
    DESCRIBE_SCHEMAS = 42
    COMPACT_TOPIC = 43
    LIST_USERS = 50
    ALTER_USERS = 51
    LIST_ACLS = 52
    ALTER_ACLS = 53
    TEST_ACL = 54
    ALTER_QUOTAS = 55
    DESCRIBE_QUOTAS = 56


API_VERSIONS: dict[int, tuple[int, int]] = {
    **dict.fromkeys(Api, (1, 1)), Api.PRODUCE: (1, 4), Api.FETCH: (2, 4), Api.LEASE_OFFSETS: (1, 2),
    Api.COMMIT_OFFSETS: (1, 2), Api.FETCH_OFFSETS: (1, 2), Api.CHANGE_DELAYS: (1, 2),
}  # fmt: skip
"""Lowest and highest version of each API in this build. HANDSHAKE's JSON stays version 1 forever.
Since version 3 PRODUCE may name a trace. Since version 4 of PRODUCE a batch may require the end of
its log. Since version 3 of FETCH a reader chooses its isolation
level, and hears what was left out. Since version 4 of FETCH a reader knows that the batches of a
typed topic may have several schemas; older ones get no such topic. Since version 2 LEASE_OFFSETS,
COMMIT_OFFSETS and FETCH_OFFSETS may name topics by id. Topics without an id are handled as in
version 1. Since version 2 CHANGE_DELAYS may belong to a transaction.
"""


def frames_max(api: int, version: int) -> int:
    """Most frames of a request, including its header."""
    return 2 + PRODUCE_FRAMES_MAX if api == Api.PRODUCE and version >= 2 else FRAMES_MAX


class WireError(ValueError):
    """A message that does not follow the protocol. `code` is for the response."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def malformed(detail: str) -> WireError:
    """The error of a message whose bytes do not follow the protocol."""
    return WireError(ErrorCode.MALFORMED_REQUEST, detail)


@dataclass(slots=True)
class RequestHeader:
    """Frame 1 of a request. `body_length` is the length of the frames after it."""

    api: int
    version: int
    correlation_id: int
    body_length: int
    flags: int = 0

    def to_bytes(self) -> bytes:
        """Encode the 24 bytes of the frame."""
        return _REQUEST.pack(
            REQUEST_MAGIC, self.api, self.version, self.correlation_id, self.flags, self.body_length
        )


@dataclass(slots=True)
class ResponseHeader:
    """Frame 1 of a response. `error`: an ErrorCode's number; `credit_limit`, `generation`: see the
    module's docstring.
    """

    api: int
    version: int
    correlation_id: int
    error: int
    body_length: int
    credit_limit: int
    generation: int
    flags: int = 0

    def to_bytes(self) -> bytes:
        """Encode the 40 bytes of the frame."""
        return _RESPONSE.pack(
            RESPONSE_MAGIC, self.api, self.version, self.correlation_id, self.error, self.flags,
            self.body_length,
            self.credit_limit, self.generation, 0,
        )  # fmt: skip


def encode_request(
    api: int, version: int, correlation_id: int, body: Sequence[Readable] = ()
) -> list[Readable]:
    """Encode the frames of a request."""
    return [
        _REQUEST.pack(REQUEST_MAGIC, api, version, correlation_id, 0, sum(map(len, body))),
        *body,
    ]


def encode_response(
    api: int,
    version: int,
    correlation_id: int,
    error: int,
    credit_limit: int,
    generation: int,
    body: Sequence[Readable] = (),
) -> list[Readable]:
    """Encode the frames of a response."""
    length = sum(map(len, body))
    return [
        _RESPONSE.pack(
            RESPONSE_MAGIC,
            api,
            version,
            correlation_id,
            error,
            0,
            length,
            credit_limit,
            generation,
            0,
        ),
        *body,
    ]


def decode_request_header(frame: Readable) -> RequestHeader:
    """Parse frame 1 of a request. Raises WireError."""
    if len(frame) != REQUEST_HEADER_BYTES:
        raise WireError(
            ErrorCode.MALFORMED_REQUEST,
            f"a request header has {REQUEST_HEADER_BYTES} bytes; this one has {len(frame)}",
        )
    magic, api, version, correlation_id, flags, body_length = _REQUEST.unpack(frame)
    if magic != REQUEST_MAGIC:
        raise WireError(
            ErrorCode.MALFORMED_REQUEST,
            f"request magic is 0x{magic:08x}; expected 0x{REQUEST_MAGIC:08x}",
        )
    if flags:
        raise WireError(ErrorCode.MALFORMED_REQUEST, f"unknown request flags 0x{flags:x}")
    return RequestHeader(api, version, correlation_id, body_length, flags)


def undecodable_request(frame: Readable) -> RequestHeader | None:
    """Read the fields of a frame 1 that `decode_request_header` rejected, for the error response.

    None if its length is wrong, so that no field can be read.
    """
    if len(frame) != REQUEST_HEADER_BYTES:
        return None
    _, api, version, correlation_id, flags, body_length = _REQUEST.unpack(frame)
    return RequestHeader(api, version, correlation_id, body_length, flags)


def response_fields(frame: Readable) -> tuple[int, ...]:
    """Parse frame 1 of a response into all its fields, magic and
    reserved included. Raises WireError.
    """
    if len(frame) != RESPONSE_HEADER_BYTES:
        raise WireError(
            ErrorCode.MALFORMED_REQUEST,
            f"a response header has {RESPONSE_HEADER_BYTES} bytes; this one has {len(frame)}",
        )
    fields = _RESPONSE.unpack(frame)
    if fields[0] != RESPONSE_MAGIC:
        raise WireError(
            ErrorCode.MALFORMED_REQUEST,
            f"response magic is 0x{fields[0]:08x}; expected 0x{RESPONSE_MAGIC:08x}",
        )
    return fields


def decode_response_header(frame: Readable) -> ResponseHeader:
    """Parse frame 1 of a response. Raises WireError."""
    _, api, version, correlation_id, error, flags, body_length, credit_limit, generation, _ = (
        response_fields(frame)
    )
    return ResponseHeader(
        api, version, correlation_id, error, body_length, credit_limit, generation, flags
    )


def check_body(body_length: int, body: Sequence[Readable]) -> None:
    """Check the body frames' length against the header. Raises WireError."""
    actual = sum(map(len, body))
    if actual != body_length:
        raise WireError(
            ErrorCode.MALFORMED_REQUEST,
            f"the header claims {body_length} body bytes; {actual} arrived",
        )
