"""Small files that must be whole or be known not to be: a JSON document that carries the checksum of its own content.

Layout: `{"crc32c":"xxxxxxxx","content":...}` and nothing behind it; the checksum is that of the content's bytes as they stand. So people and `jq` read such
a file, and a flipped bit, a cut or an overwritten tail is found.

Invariants: `replace` never follows a link, neither at the file's name nor at the temporary's, and what it makes only its owner reads, whatever the umask.
Crash: the old file or the new one is there, whole; a temporary that a kill left is removed by the next `replace`.
"""

from __future__ import annotations

import os
from typing import Any

import orjson

from tailrace.formats.checksum import Readable, crc32c
from tailrace.formats.files import DiskFiles, replace_file

_HEAD = b'{"crc32c":"%08x","content":'
_HEAD_BYTES = len(_HEAD % 0)
_READ_BYTES = 1 << 20
_DISK = DiskFiles()


def encode(content: Any) -> bytes:
    """The bytes of a document with this content, its checksum first. Raises TypeError for what JSON has not."""
    body = orjson.dumps(content)
    return _HEAD % crc32c(body) + body + b"}"


def decode(data: bytes) -> Any | None:
    """The content, or None when these bytes are not a whole, undamaged document."""
    body = data[_HEAD_BYTES:-1]
    if not body or data[:_HEAD_BYTES] != _HEAD % crc32c(body) or data[-1:] != b"}":
        return None
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:  # the checksum was written by hand
        return None


def read(path: str) -> bytes:
    """All bytes of a file that is no link. Raises OSError (ELOOP for a link, EISDIR for a directory)."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(fd, _READ_BYTES):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def replace(path: str, data: Readable) -> None:
    """Put a file with these bytes at `path`, durably (see `tailrace.formats.files.replace_file`). Raises OSError; then what was there is there still."""
    replace_file(_DISK, path, data)


def write_all(fd: int, data: Readable, position: int) -> None:
    """A write may take less than it is given: go on until all is written. Raises OSError."""
    rest = memoryview(data)
    while len(rest):
        written = os.pwrite(fd, rest, position)
        rest, position = rest[written:], position + written
