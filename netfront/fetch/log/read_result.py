"""Results and errors of reading a partition's log.

Owner: none; plain values.
"""

from __future__ import annotations

from typing import NamedTuple

from tailrace.core.error_codes import ErrorCode


class ColdRead(Exception):
    """The bytes are not in the page cache. This range must be read first."""

    def __init__(self, fd: int, position: int, length: int) -> None:
        super().__init__(position, length)
        self.fd = fd
        self.position = position
        self.length = length


class LogReadError(Exception):
    """A read failed.

    `code` gives the reason. `resume_offset` is where a reader may continue, -1 if unknown.
    """

    def __init__(self, code: ErrorCode, detail: str, resume_offset: int = -1) -> None:
        super().__init__(detail)
        self.code = code
        self.resume_offset = resume_offset


class Place(NamedTuple):
    """Read position: the batch that begins with `offset` is there."""

    offset: int
    segment_base: int
    file_position: int


class Span(NamedTuple):
    """Result of a read: bytes `start` to `end` of the buffer, and the next position."""

    start: int
    end: int
    following: Place
    has_gaps: bool = False
    """True if batches of aborted transactions were left out."""
    resume_offset: int = -1
    """The offset of `following` if what lies behind the bytes was left out, else -1."""
