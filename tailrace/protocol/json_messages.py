"""JSON bodies: all APIs have them but PRODUCE, FETCH and CREDIT; error responses have them always.

Decoders raise WireError. Size, depth and number of values are bounded, which bounds the time that
parsing blocks the loop of a front.
"""

from __future__ import annotations

from typing import Any

import orjson

from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import JSON_MAX_BYTES, WireError, malformed

JSON_DEPTH_MAX = 32
JSON_VALUES_MAX = 65_536
"""Most values in the JSON of one request."""
MESSAGE_MAX = 1_000
SHARE_RUNS_MAX = 500
"""Most offset ranges that one SHARE_ACQUIRE or SHARE_ACKNOWLEDGE acknowledges."""


def encode_json(value: Any) -> bytes:
    """Encode a JSON body."""
    return orjson.dumps(value)


def encode_error(detail: str) -> bytes:
    """Encode the body of an error response, cut to MESSAGE_MAX
    characters, as it may quote the peer.
    """
    cut = detail if len(detail) <= MESSAGE_MAX else f"{detail[:MESSAGE_MAX]}..."
    return orjson.dumps({"message": cut.encode("utf-8", "replace").decode()})


def encode_reply(code: ErrorCode, value: dict[str, Any], limit: int) -> tuple[ErrorCode, bytes]:
    """Encode a JSON response: (code, body). An error replaces a body of more than `limit` bytes."""
    body = (
        encode_error(str(value["message"]))
        if code is not ErrorCode.OK and "message" in value
        else orjson.dumps(value)
    )
    if len(body) <= limit:
        return code, body
    return ErrorCode.REQUEST_TOO_LARGE, encode_error(
        f"the response would have {len(body)} bytes; the limit is {limit}: ask for less at once"
    )


def decode_json(frame: Readable, limit: int = JSON_MAX_BYTES) -> dict[str, Any]:
    """Decode a JSON object of at most `limit` bytes, nested at most JSON_DEPTH_MAX deep.

    Raises WireError.
    """
    if len(frame) > limit:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the JSON has {len(frame)} bytes; the limit is {limit}: ask for less at once",
        )
    try:
        value = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        raise malformed(f"the body is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise malformed("the body is not a JSON object")
    if _may_be_deeper(frame, JSON_DEPTH_MAX) and _is_deeper(value, JSON_DEPTH_MAX):
        raise malformed(f"the body is nested deeper than {JSON_DEPTH_MAX} levels")
    return value


def decode_request(frame: Readable, limit: int = JSON_MAX_BYTES) -> dict[str, Any]:
    """Decode the JSON of a request, with at most JSON_VALUES_MAX values. Raises WireError.

    Values are counted before they are parsed; the count is slightly too high.
    """
    data = bytes(frame)
    if (
        len(data) <= limit
        and data.count(b",") + data.count(b"[") + data.count(b"{") > JSON_VALUES_MAX
    ):
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the JSON has more than {JSON_VALUES_MAX} values; ask for less at once",
        )
    return decode_json(data, limit)


def is_integer(value: Any, lowest: int, highest: int) -> bool:
    """True if a JSON value is an integer (not a boolean) within these bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def _may_be_deeper(frame: Readable, limit: int) -> bool:
    """False if the bytes open no more than `limit` levels: most requests have a handful."""
    return type(frame) is not bytes or frame.count(b"[") + frame.count(b"{") > limit


def _is_deeper(value: Any, limit: int) -> bool:
    """True if a JSON value is nested deeper than `limit`. Iterative, so deep nesting cannot
    overflow the stack.
    """
    level = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
