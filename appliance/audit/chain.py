"""Lines of the audit log: JSON objects, numbered and chained by their hashes. Pure.

A line is an object with `seq` first and `hash` last. `prev` is the hash of the line before, and
`hash` that of the line's own bytes without `hash`: SHA-256, or HMAC-SHA-256 with the key file's
content, as `alg` says.

Invariants:
- `seq` grows by one from line to line, over all files.
- The first line of a log has `prev` ZERO.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import orjson

ZERO = "0" * 64
PLAIN, KEYED = "sha256", "hmac-sha256"


def line_hash(text: bytes, key: bytes) -> str:
    """The hash of a line's bytes. `key` empty: a plain hash."""
    if key:
        return hmac.new(key, text, hashlib.sha256).hexdigest()
    return hashlib.sha256(text).hexdigest()


def encode_line(seq: int, prev: str, event: dict[str, Any], key: bytes) -> tuple[bytes, str]:
    """(The line with its end, its hash)."""
    body = {"seq": seq, **event, "alg": KEYED if key else PLAIN, "prev": prev}
    text = orjson.dumps(body)
    digest = line_hash(text, key)
    return text[:-1] + b',"hash":"' + digest.encode() + b'"}\n', digest


def check_line(line: bytes, key: bytes) -> tuple[dict[str, Any], str | None]:
    """(The line's object, what is wrong with its hash; None: nothing). Raises ValueError for bytes
    that are no line.
    """
    text, sign, rest = line.rpartition(b',"hash":"')
    if not sign or not rest.endswith(b'"}') or len(rest) != 66:
        raise ValueError("it has no hash at its end")
    value = orjson.loads(line)
    if not isinstance(value, dict) or type(value.get("seq")) is not int:
        raise ValueError("it is no object with a number")
    is_keyed = value.get("alg") == KEYED
    if is_keyed and not key:
        return value, "its hash is keyed: give the key file with --key-file"
    if key and not is_keyed:
        return value, "its hash is not keyed, and a key file was given"
    expected = line_hash(text + b"}", key if is_keyed else b"")
    if not hmac.compare_digest(expected.encode(), rest[:64]):
        return value, "its hash does not fit its content: it was changed"
    return value, None
