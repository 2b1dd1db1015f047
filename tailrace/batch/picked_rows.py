"""PickedRows: rows out of several batches of one schema, which become a frame of `send_arrow`.

Rows of the default schema without headers are copied once, from where they are into the message of
their batch. Others are joined into a batch first.

Owner: pure.
Invariants: the batches live, and do not change, until the rows are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tailrace import kernel
from tailrace.batch.encoded_rows import EncodedRows
from tailrace.batch.frame_encoder import gathered_rows
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.kernel.reference_arrow import null_headers

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[np.int64]]

_PLAIN = ([("key", pa.binary()), ("value", pa.binary())], [("value", pa.binary())])
_PLAIN_SCHEMAS = tuple(pa.schema(fields) for fields in _PLAIN)


class PickedRows:
    """See the module's docstring."""

    def __init__(self, batches: Sequence[pa.RecordBatch], rows: Sequence[Numbers | None]) -> None:
        """`rows`: of each batch the numbers of its rows, ascending or not; None: all of them."""
        self._batches = list(batches)
        self._rows = list(rows)

    def encoded(self, stamp_us: int) -> EncodedRows | None:
        """The rows, for a topic of the default schema; None if they are not plain. Raises
        OverflowError.
        """
        schema = self._batches[0].schema
        if not any(schema.equals(plain) for plain in _PLAIN_SCHEMAS):
            return None
        keys = self._cells(schema.get_field_index("key")) if "key" in schema.names else None
        values = self._cells(schema.get_field_index("value"))
        return gathered_rows(keys, values, stamp_us, lambda: _completed(self.batch(), stamp_us))

    def batch(self) -> pa.RecordBatch:
        """The rows as one batch. Each cell is copied once, and a batch that is used whole not at
        all.
        """
        if len(self._batches) == 1 and self._rows[0] is None:
            return self._batches[0]
        schema = self._batches[0].schema
        columns = [self._column(index, field.type) for index, field in enumerate(schema)]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _cells(self, index: int) -> kernel.GatheredCells:
        return kernel.GatheredCells([batch.column(index) for batch in self._batches], self._rows)

    def _column(self, index: int, kind: pa.DataType) -> pa.Array:
        if not pa.types.is_binary(kind) and not pa.types.is_string(kind):
            return pa.concat_arrays(
                [
                    batch.column(index)
                    if rows is None
                    else batch.column(index).take(pa.array(rows))
                    for batch, rows in zip(self._batches, self._rows, strict=True)
                ]
            )
        cells = self._cells(index)
        data = cells.data()
        buffers = [
            None if cells.valid is None else pa.py_buffer(cells.valid),
            pa.py_buffer(cells.offsets),
            pa.py_buffer(data),
        ]
        kernel.keep_message(data)  # its memory is another piece's once nobody sees it
        return pa.Array.from_buffers(kind, len(cells.offsets) // 4 - 1, buffers, cells.null_count)


def _completed(rows: pa.RecordBatch, stamp_us: int) -> pa.RecordBatch:
    """The rows with all columns of the default schema."""
    count = rows.num_rows
    columns = [
        pa.repeat(pa.scalar(stamp_us, pa.int64()), count).view(DEFAULT_SCHEMA.field(0).type),
        rows.column("key") if "key" in rows.schema.names else pa.nulls(count, pa.binary()),
        rows.column("value"),
        null_headers(count),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA)
