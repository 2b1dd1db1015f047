"""Requests of METADATA and LIST_OFFSETS, which a front answers from its catalog and the logs.

Decoders raise WireError. LIST_OFFSETS marks an invalid entry, and serves the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.protocol.fetch_messages import ISOLATION_LEVELS, READ_COMMITTED, READ_UNCOMMITTED
from tailrace.protocol.frame import WireError, malformed
from tailrace.protocol.json_messages import decode_request, is_integer

TOPICS_AT_ONCE_MAX = 4_096
OFFSETS_AT_ONCE_MAX = 4_096
OFFSETS_BY_OFFSET = ("behind", "time_of")
"""Kinds of offset lookup that take an offset, as in {"behind": offset}."""
_INT64_MAX = (1 << 63) - 1
_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1


class MetadataRequest(NamedTuple):
    """A METADATA request."""

    topics: list[str] | None
    """Distinct names; None: all topics."""
    names_only: bool
    after: str | None
    """With `names_only`, the last name of the previous page, "" for the first page.
    None: no pages.
    """


def decode_metadata(frame: Readable) -> MetadataRequest:
    """Decode a METADATA request. Raises WireError."""
    request = decode_request(frame)
    names, names_only, after = (
        request.get("topics"),
        request.get("names_only", False),
        request.get("after"),
    )
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise malformed("`topics` must be a list of names, or null for all")
    if names is not None and len(names) > TOPICS_AT_ONCE_MAX:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the request has {len(names)} topics; the limit is {TOPICS_AT_ONCE_MAX}: ask for "
            "fewer at once",
        )
    if names_only is not None and not isinstance(names_only, bool):
        raise malformed("`names_only` must be true or false")
    if after is not None and not isinstance(after, str):
        raise malformed("`after` must be a name, or null")
    return MetadataRequest(
        None if names is None else list(dict.fromkeys(names)), bool(names_only), after
    )


class ListOffsetsEntry(NamedTuple):
    """An entry of a LIST_OFFSETS request."""

    topic: str
    partition: int
    at: str | int
    """`earliest`, `latest`, `behind`, `time_of`, or a time in microseconds."""
    offset: int
    """The offset of `behind` and `time_of`."""
    code: ErrorCode
    """INVALID_REQUEST for an invalid entry."""
    is_uncommitted: bool = False
    """True if what is open or aborted counts too."""


def decode_list_offsets(frame: Readable) -> list[ListOffsetsEntry]:
    """Decode a LIST_OFFSETS request. An invalid entry is marked, and the others are served.

    Raises WireError.
    """
    request = decode_request(frame)
    requested, isolation = request.get("partitions"), request.get("isolation", READ_COMMITTED)
    if isolation not in ISOLATION_LEVELS:
        raise malformed(f"`isolation` must be {' or '.join(ISOLATION_LEVELS)}")
    if not isinstance(requested, list) or not all(isinstance(item, dict) for item in requested):
        raise malformed("`partitions` must be a list of {topic, partition, at}")
    if len(requested) > OFFSETS_AT_ONCE_MAX:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the request has {len(requested)} partitions; the limit is {OFFSETS_AT_ONCE_MAX}: "
            "ask for fewer at once",
        )
    is_uncommitted = isolation == READ_UNCOMMITTED
    return [_list_offsets_entry(item, is_uncommitted) for item in requested]


def _list_offsets_entry(item: dict[str, Any], is_uncommitted: bool) -> ListOffsetsEntry:
    topic, partition = item.get("topic"), item.get("partition")
    at: Any = item.get("at")
    known_topic = topic if isinstance(topic, str) else None
    known_partition = partition if is_integer(partition, _INT32_MIN, _INT32_MAX) else None
    offset = -1
    way = (
        next((way for way in OFFSETS_BY_OFFSET if way in at), None)
        if isinstance(at, dict)
        else None
    )
    if way is not None and is_integer(at[way], 0, _INT64_MAX):
        at, offset = way, at[way]
    elif at not in ("earliest", "latest") and not is_integer(at, -_INT64_MAX, _INT64_MAX):
        known_topic = None
    if known_topic is None or known_partition is None:
        echo = topic if isinstance(topic, str) else ""
        return ListOffsetsEntry(
            echo,
            -1 if known_partition is None else known_partition,
            "",
            -1,
            ErrorCode.INVALID_REQUEST,
        )
    return ListOffsetsEntry(known_topic, known_partition, at, offset, ErrorCode.OK, is_uncommitted)
