"""Body of a request that has one frame."""

from __future__ import annotations

from netfront.session.time_slicing import TimeSlicer
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import JSON_MAX_BYTES, RequestHeader, WireError


def one_frame(
    time_slicer: TimeSlicer,
    header: RequestHeader,
    body: list[bytes],
    limit: int = JSON_MAX_BYTES,
) -> bytes:
    """Return the only frame of a body, and count the work of parsing it. Raises WireError."""
    if len(body) != 1:
        raise WireError(
            ErrorCode.MALFORMED_REQUEST,
            f"API {header.api} takes one body frame; the request has {len(body)}",
        )
    if len(body[0]) > limit:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the request has {len(body[0])} bytes of JSON; the limit is {limit}: ask for "
            "less at once",
        )
    time_slicer.spend(1 + (len(body[0]) >> 9))
    return body[0]
