"""Builds batches of the default schema from lists of record parts, with Arrow's library.

It is the reference for the compiled kernel's encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.core.errors import InvalidRecordError
from tailrace.core.records import Headers
from tailrace.format.schema import DEFAULT_SCHEMA, HEADER_TYPE, TIMESTAMP_TYPE


def null_headers(count: int) -> pa.Array:
    """The header column of `count` records without headers, 4 bytes and a bit each.

    `pa.nulls` would make children of the same length, which are sent as well.
    """
    validity, offsets = pa.py_buffer(bytes((count + 7) // 8)), pa.py_buffer(bytes(4 * (count + 1)))
    return pa.Array.from_buffers(
        HEADER_TYPE,
        count,
        [validity, offsets],
        null_count=count,
        children=[pa.nulls(0, HEADER_TYPE.value_type)],
    )


def default_rows(
    timestamps_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]],
    keys: list[bytes | None],
    values: list[bytes | None],
    headers: list[Headers] | None,
) -> pa.RecordBatch:
    """A batch of the default schema from lists of equal length.

    Raises InvalidRecordError for parts of a wrong type.
    """
    try:
        if headers is None:
            header_column = null_headers(len(values))
        else:
            header_column = pa.array(
                [[{"key": k, "value": v} for k, v in row] if row else None for row in headers],
                HEADER_TYPE,
            )
        columns = [
            pa.array(timestamps_us, pa.int64()).view(TIMESTAMP_TYPE),
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
            header_column,
        ]
        return pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError) as error:
        raise InvalidRecordError(f"a record cannot be encoded: {error}") from None
