"""Columns that are there as buffers, laid into an Arrow message: one copy, and the checksum on the way.

Owner: pure; what is kept of messages that are not used any more is the compiled kernel's alone.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.formats.checksum import Readable

_PADDING = (b"", b"\0" * 7, b"\0" * 6, b"\0" * 5, b"\0" * 4, b"\0" * 3, b"\0" * 2, b"\0")


def lay_message(template: Any, row_count: int, nodes: Sequence[int], pieces: list[Readable | int], gap: int) -> tuple[bytearray, int]:
    """An encapsulated Arrow message whose metadata has `gap` more bytes of padding, zeros, a multiple of 8, than it needs; and the CRC32C of all but those.

    `template`: metadata of the schema and where its numbers are (`tailrace.few_rows.Template`). `nodes`: length and nulls of each column. `pieces`: bytes for
    each buffer, or a number for so many zeros. Raises ValueError when the metadata has room for fewer, or the message would have more than 2 GiB.
    """
    from tailrace.formats.checksum import crc32c

    metadata_bytes = template[0]
    size = len(metadata_bytes)
    _check_room(template, size, len(nodes), len(pieces))
    places: list[int] = []
    parts: list[Readable] = []
    end = 0
    for piece in pieces:
        if isinstance(piece, int):
            piece = bytes(piece)
        length = len(piece)
        places += (end, length)
        parts += (piece, _PADDING[length & 7])
        end += length + 7 & ~7
    if size + gap + end > 1 << 31:
        raise ValueError("a batch of more than 2 GiB")
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
            raise ValueError(f"the metadata, of {size} bytes, has no room for {node_numbers} numbers of columns and {piece_count} buffers")


def keep_message(message: bytearray) -> None:
    """A message is not used any more, as far as the caller knows: its memory may become another's. Here Python frees it."""


def copied(data: Readable) -> bytearray:
    """A copy that may be changed, in memory that was kept where there is some."""
    return bytearray(data)
