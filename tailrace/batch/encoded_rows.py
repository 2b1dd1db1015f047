"""EncodedRows: rows of a frame as Arrow buffers, ready for a batch's message.

`tailrace.batch.frame_encoder` makes them with pyarrow; this module does not import it.

Invariants:
- The buffers live as long as the object.
- `batch()` has the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace import kernel

if TYPE_CHECKING:
    import pyarrow as pa

    from tailrace.kernel.reference_frames import Piece
    from tailrace.kernel.small_batch import Template


class EncodedRows:
    """Rows that will become one batch."""

    __slots__ = ("_make_batch", "_nodes", "_pieces", "_template", "byte_count", "num_rows")

    def __init__(
        self,
        template: Template,
        num_rows: int,
        nodes: list[int],
        pieces: list[Piece],
        make_batch: Callable[[], pa.RecordBatch],
    ) -> None:
        """`pieces` has the content of each buffer, see `tailrace.kernel.lay_message`.

        `make_batch` returns the same rows as a pyarrow batch.
        """
        self._template = template
        self.num_rows = num_rows
        self._nodes = nodes
        self._pieces = pieces
        self._make_batch = make_batch
        self.byte_count = len(template.metadata)
        """The length of the message."""
        for piece in pieces:
            if piece:
                length = piece if type(piece) is int else len(piece)  # type: ignore[arg-type]
                self.byte_count += length + 7 & ~7

    def batch(self) -> pa.RecordBatch:
        """The rows as a pyarrow batch."""
        return self._make_batch()

    def message(self, gap: int) -> tuple[bytearray, int]:
        """The message and its checksum, with `gap` zeros (a multiple of 8) after its metadata.

        The checksum excludes the gap.
        """
        return kernel.lay_message(self._template, self.num_rows, self._nodes, self._pieces, gap)
