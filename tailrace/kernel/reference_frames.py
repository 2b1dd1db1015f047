"""Lays columns that exist as buffers into an Arrow message: one copy, with the checksum.

Owner: pure. Only the compiled kernel keeps the memory of released messages.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeAlias

from tailrace.kernel.reference_gather import GatheredCells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.format.crc32c import Readable

Piece: TypeAlias = "Readable | int | GatheredCells"
"""The content of a buffer: bytes, a number of zeros, or cells to gather."""
_PADDING = (b"", b"\0" * 7, b"\0" * 6, b"\0" * 5, b"\0" * 4, b"\0" * 3, b"\0" * 2, b"\0")


def lay_message(
    template: Any, row_count: int, nodes: Sequence[int], pieces: list[Piece], gap: int
) -> tuple[bytearray, int]:
    """Build an encapsulated Arrow message with `gap` zeros (a multiple of 8) after its metadata.

    Returns the message and its CRC32C without the gap. `template` is the schema's
    `tailrace.kernel.small_batch.Template`. `nodes` has length and nulls of each column. `pieces`
    has the bytes of each buffer, a number for that many zeros, or cells that are gathered into the
    message. Raises ValueError if the metadata
    has too little room, or the message would exceed 2 GiB.
    """
    from tailrace.format.crc32c import crc32c

    metadata_bytes = template[0]
    size = len(metadata_bytes)
    _check_room(template, size, len(nodes), len(pieces))
    places: list[int] = []
    parts: list[Readable] = []
    end = 0
    for piece in pieces:
        if isinstance(piece, int):
            piece = bytes(piece)
        elif isinstance(piece, GatheredCells):
            piece = piece.data()
        length = len(piece)
        places += (end, length)
        parts += (piece, _PADDING[length & 7])
        end += length + 7 & ~7
    if size + gap + end > 1 << 31:
        raise ValueError("the batch would have more than 2 GiB; use fewer rows")
    metadata = bytearray(metadata_bytes)
    struct.pack_into("<I", metadata, 4, size - 8 + gap)
    struct.pack_into("<q", metadata, template[1], row_count)
    struct.pack_into(f"<{len(nodes)}q", metadata, template[2], *nodes)
    struct.pack_into(f"<{len(places)}q", metadata, template[3], *places)
    struct.pack_into("<q", metadata, template[4], end)
    message = bytearray(b"").join((metadata, bytes(gap), *parts))
    with memoryview(message) as view:
        return message, crc32c(view[size + gap :], crc32c(view[:size]))


def _check_room(template: Any, size: int, node_numbers: int, piece_count: int) -> None:
    _, *places = template
    for place, length in zip(places, (8, 8 * node_numbers, 16 * piece_count, 8), strict=True):
        if not 8 <= place <= size - length:
            raise ValueError(
                f"the metadata of {size} bytes has no room for {node_numbers} column numbers and "
                f"{piece_count} buffers"
            )


def keep_message(message: bytearray) -> None:
    """Release a message, whose memory may be reused. Here Python frees it."""
