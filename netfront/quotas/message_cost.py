"""Cost of a message that is not decoded yet: its API, and the partitions that it creates."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import orjson

from tailrace.protocol.frame import REQUEST_HEADER_BYTES

if TYPE_CHECKING:
    pass

_API = struct.Struct("<4xH2xQ")


def api_of(frames: list[bytes]) -> int:
    """The API number of a message, 0 if it has no header."""
    header = frames[1] if len(frames) > 1 else b""
    return int(_API.unpack_from(header)[0]) if len(header) == REQUEST_HEADER_BYTES else 0


def mutation_count(frames: list[bytes]) -> int:
    """Partitions that a request creates or deletes, about: 1 for a topic whose number it does not
    have.
    """
    try:
        topics = orjson.loads(frames[2])["topics"]
        return max(1, sum(_partitions_of(topic) for topic in topics))
    except (LookupError, TypeError, ValueError):
        return 1


def _partitions_of(topic: Any) -> int:
    count = topic.get("partitions", 1) if isinstance(topic, dict) else 1
    return min(count, 1 << 20) if type(count) is int and count > 0 else 1
