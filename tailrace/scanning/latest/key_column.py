"""The key column of a scan: its choice, and the numbers of its keys.

Invariants:
- Two keys have one number if and only if they are equal in the column's own type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.core.errors import InvalidSettingError
from tailrace.kernel import KeyNumbers
from tailrace.scanning.columns import Column, chosen_columns

TAGS_END = 1 << 32
"""The end of the range of `KeyNumbers.tags`."""
KEY = "key"


def chosen_key(topic: str, schema: pa.Schema, requested: str | None, *, typed: bool) -> Column:
    """The column that has the keys of a topic. Raises InvalidSettingError."""
    if not typed and requested not in (None, KEY):
        raise InvalidSettingError(
            f"key_column is {requested!r:.100}, but topic {topic!r} has records with keys of their "
            "own; leave it out"
        )
    if typed and requested is None:
        raise InvalidSettingError(
            f"topic {topic!r} has columns of its own; name the one that is the key, such as "
            f"key_column={schema.names[0]!r}"
        )
    (column,) = chosen_columns(topic, schema, [requested or KEY], typed=typed)
    if plain_type(column.kind) is None:
        raise InvalidSettingError(
            f"column {column.name!r} of topic {topic!r} is {column.kind}, which cannot be a key; a "
            "key is text, bytes, an integer, a decimal, a date or a time"
        )
    return column


def plain_type(kind: pa.DataType) -> pa.DataType | None:
    """The type with the same values that `number_keys` takes, None if there is none."""
    types = pa.types
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.utf8()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_boolean(kind):
        return pa.uint8()
    is_taken = (
        types.is_binary(kind)
        or types.is_string(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_integer(kind)
        or types.is_decimal(kind)
        or types.is_temporal(kind)
    )
    return kind if is_taken else None


def number_keys(
    keys: KeyNumbers, column: pa.Array, low: int = 0, high: int = TAGS_END
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The number of each row's key, -1 for a null or a tag outside `low` to `high - 1`."""
    kind = plain_type(column.type)
    assert kind is not None, column.type
    if kind != column.type:
        column = column.cast(kind)
    out = np.empty(len(column), np.int32)
    buffers = column.buffers()
    validity = buffers[0] if column.null_count else None
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        keys.numbers(
            validity, buffers[1], buffers[2], column.offset, len(column), 0, out, low, high
        )
    else:
        width = kind.bit_width // 8
        keys.numbers(validity, None, buffers[1], column.offset, len(column), width, out, low, high)
    return out
