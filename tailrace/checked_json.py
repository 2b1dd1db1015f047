"""Small files that must be whole or be known not to be: a JSON document that carries the checksum of its own content.

Layout: `{"crc32c":"xxxxxxxx","content":...}` and nothing behind it; the checksum is that of the content's bytes as they stand. So people and `jq` read such a
file, and a flipped bit, a cut or an overwritten tail is found.
"""

from __future__ import annotations

from typing import Any

import orjson

from tailrace.checksum import crc32c

_HEAD = b'{"crc32c":"%08x","content":'
_HEAD_BYTES = len(_HEAD % 0)


def encode(content: Any) -> bytes:
    body = orjson.dumps(content)
    return _HEAD % crc32c(body) + body + b"}"


def decode(data: bytes) -> Any | None:
    """The content, or None when these bytes are not a whole, undamaged document."""
    body = data[_HEAD_BYTES:-1]
    if not body or data[:_HEAD_BYTES] != _HEAD % crc32c(body) or data[-1:] != b"}":
        return None
    return orjson.loads(body)
