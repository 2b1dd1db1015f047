"""Small JSON files that contain the checksum of their own content.

Layout: `{"crc32c":"xxxxxxxx","content":...}` with nothing after it. The checksum covers the bytes
of the content. People and `jq` can read such a file, and a flipped bit, a cut or an overwritten
tail is detected.

Invariants:
- `replace` never follows a link, neither at the file's name nor at the temporary's.
- Only the owner can read the files, regardless of the umask.

Crash: the old or the new file is there, whole. The next `replace` removes a left temporary.
"""

from __future__ import annotations

import os
from typing import Any

import orjson

from tailrace.format.crc32c import Readable, crc32c
from tailrace.format.directory.files import DiskFiles, replace_file

_HEAD = b'{"crc32c":"%08x","content":'
_HEAD_BYTES = len(_HEAD % 0)
_READ_BYTES = 1 << 20
_DISK = DiskFiles()


def encode(content: Any) -> bytes:
    """Encode a document with this content. Raises TypeError for values that JSON lacks."""
    body = orjson.dumps(content)
    return _HEAD % crc32c(body) + body + b"}"


def decode(data: bytes) -> Any | None:
    """Decode the content. None if the bytes are not a whole, undamaged document."""
    body = data[_HEAD_BYTES:-1]
    if not body or data[:_HEAD_BYTES] != _HEAD % crc32c(body) or data[-1:] != b"}":
        return None
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:  # a checksum that fits bytes that are not JSON
        return None


def read(path: str) -> bytes:
    """Read a whole file. Raises OSError (ELOOP for a link, EISDIR for a directory)."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(fd, _READ_BYTES):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def replace(path: str, data: Readable) -> None:
    """Replace the file at `path` durably (see `tailrace.format.directory.files.replace_file`).

    Raises OSError; the old file is then still there.
    """
    replace_file(_DISK, path, data)


def write_all(fd: int, data: Readable, position: int) -> None:
    """Write all of `data` at `position`, in several writes if needed. Raises OSError."""
    rest = memoryview(data)
    while len(rest):
        written = os.pwrite(fd, rest, position)
        rest, position = rest[written:], position + written
