"""Bodies of CREDIT: the bytes that a producer asks to send, and the wait that a push reports.

Layout: a request is requested_bytes u64, little endian. A push is JSON.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import WireError, malformed
from tailrace.protocol.json_messages import decode_json

_CREDIT = struct.Struct("<Q")


def encode_credit(requested_bytes: int) -> bytes:
    """Encode the body of a CREDIT request."""
    return _CREDIT.pack(requested_bytes)


def decode_credit(frame: Readable) -> int:
    """The bytes that a CREDIT request asks to send. Raises WireError."""
    if len(frame) != _CREDIT.size:
        raise malformed(f"a credit request has {_CREDIT.size} bytes; this one has {len(frame)}")
    return int(_CREDIT.unpack(frame)[0])


def throttled_ms(body: Sequence[Readable]) -> int:
    """The wait for a quota that a CREDIT push reports, 0 if it has none."""
    try:
        waited = decode_json(body[0]).get("ms", 0)
    except WireError:
        return 0
    return waited if type(waited) is int and waited > 0 else 0
