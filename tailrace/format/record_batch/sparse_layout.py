"""The layout of sparse batches and of cleaned segments, without an Arrow library.

A sparse batch (ATTRIBUTE_SPARSE) has the columns of its topic's schema and, last, one more: the
offset of each row, int64 and not null. A cleaned segment is a segment whose schema message has that
column. All its batches have its layout. `tailrace.format.record_batch.sparse_batch` encodes and
decodes them.

Owner: pure.

Invariants:
- `sparse_layout(layout)` begins with the nodes of `layout`: a column of the topic has the same
  number and the same buffers in both.
"""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache

from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.arrow_metadata import (
    ArrowMetadataError,
    BufferKind,
    BufferSpec,
    NodeSpec,
    SchemaLayout,
    read_schema,
)

OFFSET_COLUMN = "offset"
_INT = 2
"""The number of integers in Arrow's union Type."""
_BUFFERS = (BufferSpec(BufferKind.VALIDITY), BufferSpec(BufferKind.FIXED, 64))


def offset_column_name(names: Container[str]) -> str:
    """The name of the column with offsets beside columns of these names: `offset`, or with as many
    `@` before it as make it different from all of them.
    """
    name = OFFSET_COLUMN
    while name in names:
        name = f"@{name}"
    return name


@lru_cache(maxsize=16)
def sparse_layout(layout: SchemaLayout) -> SchemaLayout:
    """The layout of sparse batches of the topic with this layout."""
    name = offset_column_name([node.name for node in layout.nodes if node.top_level])
    column = NodeSpec(name, True, _BUFFERS, kind=(_INT, True))
    return SchemaLayout((*layout.nodes, column), layout.buffer_count + len(_BUFFERS))


def is_cleaned_schema(message: Readable, layout: SchemaLayout) -> bool:
    """True if `message` is the schema message of a cleaned segment of the topic with this layout.

    False for any other bytes.
    """
    try:
        return read_schema(message) == sparse_layout(layout)
    except ArrowMetadataError:
        return False
