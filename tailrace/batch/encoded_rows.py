"""Rows of a frame as the buffers that they lie in, on their way to a batch's message (made in `tailrace.plain_frames`, which needs pyarrow; this does not).

Invariants: the buffers stay as long as this does; `batch()` has the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace import kernel
from tailrace.formats.checksum import Readable

if TYPE_CHECKING:
    import pyarrow as pa

    from tailrace.few_rows import Template


class PlainRows:
    """Rows that are to become one batch."""

    __slots__ = ("_make_batch", "_nodes", "_pieces", "_template", "byte_count", "num_rows")

    def __init__(
        self,
        template: Template,
        num_rows: int,
        nodes: list[int],
        pieces: list[Readable | int],
        make_batch: Callable[[], pa.RecordBatch],
    ) -> None:
        """`pieces`: what each buffer holds, a number for so many zeros. `make_batch`: the same rows as pyarrow has them."""
        self._template = template
        self.num_rows = num_rows
        self._nodes = nodes
        self._pieces = pieces
        self._make_batch = make_batch
        self.byte_count = len(template.metadata)
        """Of the message."""
        for piece in pieces:
            if piece:
                self.byte_count += (piece if type(piece) is int else len(piece)) + 7 & ~7  # type: ignore[arg-type]

    def batch(self) -> pa.RecordBatch:
        """As pyarrow has them."""
        return self._make_batch()

    def message(self, gap: int) -> tuple[bytearray, int]:
        """The message, with so many zeros, a multiple of 8, behind its metadata; and the checksum of all of it but these."""
        return kernel.lay_message(self._template, self.num_rows, self._nodes, self._pieces, gap)
