"""Exact floats: values of a frame or of rows that a float column of fewer bits has rounded.

A producer that has not met a widening (float32 to float64) encodes a row with the type that it
knows, and the appliance refuses the batch. When the batch is converted, the column has the values
that the program gave (`with_exact`), and not the rounded ones.

Owner: pure. A batch of a producer keeps what is found, until it has an outcome.

Invariants: a column without a rounded value is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.format.schema import narrow_floats

PREFIX = "@exact:"
"""Names of exact columns beside those of a table. No topic has a column of such a name."""
Exact = Mapping[int, Any]
"""Place of a column in the schema -> its exact values, an array of float64."""


def of_rows(
    values: Sequence[Mapping[str, Any]], rows: pa.RecordBatch, places: Sequence[int]
) -> Exact | None:
    """The exact values of columns of `rows`, which was made from `values`. None: all are exact."""
    found = {}
    for place in places:
        name = rows.schema.field(place).name
        given = pa.array([row.get(name) for row in values], pa.float64())
        if _is_rounded(given, rows.column(place)):
            found[place] = given
    return found or None


def beside(table: pa.Table, conformed: pa.Table) -> pa.Table:
    """The conformed table, with a column for the exact values of each that was rounded."""
    made = conformed
    for place in narrow_floats(conformed.schema):
        name = conformed.schema.field(place).name
        given = table.column(name)
        if pa.types.is_dictionary(given.type):
            given = given.cast(given.type.value_type)
        if (
            pa.types.is_floating(given.type) and given.type != conformed.schema.types[place]
        ) and _is_rounded(given := given.cast(pa.float64()), conformed.column(place)):
            made = made.append_column(f"{PREFIX}{place}", given)
    return made


def apart(rows: pa.RecordBatch, count: int) -> tuple[pa.RecordBatch, Exact | None]:
    """The first `count` columns of rows, and the exact values beside them."""
    if rows.num_columns == count:
        return rows, None
    names = rows.schema.names[count:]
    found = {
        int(name.removeprefix(PREFIX)): _copied(rows.column(count + number))
        for number, name in enumerate(names)
    }
    return rows.select(range(count)), found


def with_exact(
    rows: pa.RecordBatch, exact: Exact, kinds: Mapping[int, pa.DataType] | None = None
) -> pa.RecordBatch:
    """The rows with exact values in the columns that `kinds` widens to these types; None: in all,
    as float64.
    """
    columns, fields = rows.columns, list(rows.schema)
    for place, given in exact.items():
        kind = given.type if kinds is None else kinds.get(place)
        if kind is not None:
            columns[place] = given.cast(kind)
            fields[place] = fields[place].with_type(kind)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def picked(exact: Exact, rows: Sequence[int]) -> Exact:
    """The exact values of some rows, in this order."""
    return {place: given.take(pa.array(rows, pa.int64())) for place, given in exact.items()}


def sliced(exact: Exact, start: int, count: int) -> Exact:
    """The exact values of consecutive rows."""
    return {place: given.slice(start, count) for place, given in exact.items()}


def _copied(given: Any) -> Any:
    """A copy of an array, which may be the program's memory."""
    return pa.concat_arrays([given, given.slice(0, 0)])


def _is_rounded(given: Any, stored: Any) -> bool:
    """True if a stored float is another number than the given one."""
    is_same = pc.or_(pc.equal(stored.cast(pa.float64()), given), pc.is_nan(given))
    return not pc.all(is_same.fill_null(True), min_count=0).as_py()
