"""Columns of a typed topic as JSON, and JSON as columns.

| type | JSON |
|---|---|
| numbers, booleans, text | themselves; a float that is not a number or infinite is null |
| decimal | text, such as "12.50" (in: also a number) |
| bytes | text in base64 |
| timestamp | text in ISO 8601, UTC (in: also milliseconds since 1970, as Kafka Connect has them) |
| date, time | text in ISO 8601 |
| duration | its number in the column's unit |
| list, struct | array, object |
| map | an object if its keys are text, else an array of pairs (in: either) |

Owner: pure.

Invariants:
- What `to_json_cells` writes, `from_json_cells` reads as the same values, but for floats that JSON
  does not have.
- A value that does not fit its column is an error that names row and column.
"""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from netfront.kafka.records.errors import MisfitError

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
_ERRORS = (ValueError, TypeError, OverflowError, InvalidOperation, pa.ArrowException)
Convert = Callable[[Any], Any]


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode("ascii")


def _iso(stamps: pa.Array) -> pa.Array:
    return pc.strftime(stamps.cast(pa.timestamp("us")), format="%Y-%m-%dT%H:%M:%SZ")


def to_json_cells(column: pa.Array) -> list[Any]:
    """The values of a column as orjson takes them."""
    kind, types = column.type, pa.types
    if types.is_timestamp(kind):
        column = _iso(column)
    elif types.is_date(kind) or types.is_time(kind) or types.is_decimal(kind):
        column = column.cast(pa.utf8())
    elif types.is_duration(kind):
        column = column.cast(pa.int64())
    elif types.is_binary(kind) or types.is_fixed_size_binary(kind):
        return [_base64(value) for value in column.to_pylist()]
    elif types.is_struct(kind):
        return _struct_cells(column)
    elif types.is_map(kind) or types.is_list(kind) or types.is_fixed_size_list(kind):
        return _list_cells(column)
    elif types.is_interval(kind):
        return [None if value is None else list(value) for value in column.to_pylist()]
    return list(column.to_pylist())


def _struct_cells(column: pa.Array) -> list[Any]:
    names = [field.name for field in column.type]
    columns = [to_json_cells(child) for child in column.flatten()]
    valid = column.is_valid().to_pylist()
    rows = zip(*columns, strict=True) if columns else iter([()] * len(column))
    return [
        dict(zip(names, row, strict=True)) if is_valid else None
        for row, is_valid in zip(rows, valid, strict=True)
    ]


def _list_cells(column: pa.Array) -> list[Any]:
    """Lists of any kind, as arrays; maps whose keys are text as objects."""
    lengths = pc.list_value_length(column) if not pa.types.is_map(column.type) else None
    if lengths is None:
        offsets = column.offsets.to_pylist()
        keys, items = column.keys, column.items
        start = offsets[0] if offsets else 0
        keys_json = to_json_cells(_between(keys, start, offsets[-1]))
        items_json = to_json_cells(_between(items, start, offsets[-1]))
        pairs = list(zip(keys_json, items_json, strict=True))
        shape: Convert = dict if pa.types.is_string(column.type.key_type) else list
        found = [shape(pairs[a - start : b - start]) for a, b in pairwise(offsets)]
    else:
        flat, at, found = to_json_cells(column.flatten()), 0, []
        for length in lengths.to_pylist():
            found.append(flat[at : at + (length or 0)])
            at += length or 0
    return [
        cell if is_valid else None
        for cell, is_valid in zip(found, column.is_valid().to_pylist(), strict=True)
    ]


def _between(column: pa.Array, start: int, end: int) -> pa.Array:
    """The cells from `start` to before `end`. A map's keys and items begin with its first cell or
    with the column's, by the version of Arrow.
    """
    return column if len(column) == end - start else column.slice(start, end - start)


# ---- in ------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def _to_bytes(value: Any) -> bytes:
    return base64.b64decode(_text(value), validate=True)


def _to_timestamp(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value * 1000
    moment = dt.datetime.fromisoformat(_text(value))
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    return (moment - _EPOCH) // _MICROSECOND


def _to_decimal(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return Decimal(str(value))


def _to_integer(value: Any) -> Any:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value} is not a whole number")
    return int(value) if isinstance(value, float) else value


def _to_float(value: Any) -> Any:
    if isinstance(value, bool):
        raise TypeError("expected a number, got bool")
    return value


def _to_date(value: Any) -> dt.date:
    return dt.date.fromisoformat(_text(value))


def _to_time(value: Any) -> dt.time:
    return dt.time.fromisoformat(_text(value))


def _converter(kind: pa.DataType) -> Convert:
    """The function from a JSON value, which is not null, to one that Arrow takes."""
    types = pa.types
    simple: list[tuple[Callable[[pa.DataType], bool], Convert]] = [
        (types.is_timestamp, _to_timestamp),
        (types.is_date, _to_date),
        (types.is_time, _to_time),
        (types.is_decimal, _to_decimal),
        (types.is_integer, _to_integer),
        (types.is_duration, _to_integer),
        (types.is_floating, _to_float),
        (types.is_string, _text),
        (types.is_binary, _to_bytes),
        (types.is_fixed_size_binary, _to_bytes),
        (types.is_interval, tuple),
    ]
    for is_kind, convert in simple:
        if is_kind(kind):
            return convert
    if types.is_struct(kind):
        return _struct_converter(kind)
    if types.is_map(kind):
        key, item = _nullable(kind.key_type), _nullable(kind.item_type)

        def to_pairs(value: Any) -> list[tuple[Any, Any]]:
            pairs = value.items() if isinstance(value, dict) else value
            return [(key(k), item(v)) for k, v in pairs]

        return to_pairs
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        of_items = _nullable(kind.value_type)

        def to_list(value: Any) -> list[Any]:
            if not isinstance(value, list):
                raise TypeError(f"expected an array, got {type(value).__name__}")
            return [of_items(item) for item in value]

        return to_list
    return lambda value: value


def _nullable(kind: pa.DataType) -> Convert:
    convert = _converter(kind)
    return lambda value: None if value is None else convert(value)


def _struct_converter(kind: pa.DataType) -> Convert:
    fields = {field.name: _nullable(field.type) for field in kind}

    def to_struct(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"expected an object, got {type(value).__name__}")
        unknown = value.keys() - fields.keys()
        if unknown:
            raise ValueError(f"there is no field {min(unknown)!r:.100}")
        return {name: convert(value.get(name)) for name, convert in fields.items()}

    return to_struct


class JsonColumn:
    """Reads the JSON values of one column."""

    def __init__(self, field: pa.Field) -> None:
        self.name, self._kind = field.name, field.type
        self._convert = _nullable(field.type)

    def cells(self, values: list[Any]) -> pa.Array:
        """The values as a column. Raises MisfitError."""
        converted: list[Any] = []
        try:
            converted = [self._convert(value) for value in values]
            return pa.array(converted, self._kind)
        except _ERRORS as error:
            raise self._misfit(values, error) from None

    def _misfit(self, values: list[Any], error: Exception) -> MisfitError:
        """The error of the first value that fits no column alone."""
        for row, value in enumerate(values):
            try:
                pa.array([self._convert(value)], self._kind)
            except _ERRORS as found:
                return MisfitError(
                    row,
                    f"has {_short(value)} in column {self.name!r}, which takes {self._kind}: "
                    f"{found}",
                )
        return MisfitError(0, f"does not fit column {self.name!r}, {self._kind}: {error}")


def _short(value: Any) -> str:
    return f"{value!r}"[:60]


def key_text(cell: Any) -> bytes | None:
    """The key of a row as Kafka's clients see it: text and bytes as they are, else JSON."""
    if cell is None or isinstance(cell, bytes):
        return cell
    if isinstance(cell, float) and not math.isfinite(cell):
        return b"null"
    return str(cell).encode()
