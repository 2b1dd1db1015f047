"""Types and values between topics, DuckDB and Python, also for times outside Python's range: the
log takes years of six digits, which mistaken units give.

Owner: `tailrace sql`.
Invariants:
- Pure. No value is left out.
- A time outside the years 1 to 9999 is text, as ISO 8601 writes such years. DuckDB's infinity is
  `infinity`.
- A value of a type that Arrow lacks is text, as DuckDB writes it: an unsigned number of 128 bits
  would become negative, bits would become bytes.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

import click
import pyarrow as pa

DAYS_OF_400_YEARS = 146_097
DAYS_TO_1970 = 719_162
"""Days from the first day of year 1 to 1970-01-01."""
UNITS_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
INFINITE = {"timestamp": 2**63 - 1, "date": 2**31 - 1}


WITHOUT_ARROW = re.compile(r"\b(UHUGEINT|BIGNUM|VARINT|BIT|INTERVAL)\b")
"""Types that Arrow has not, or writes otherwise."""


def unknown_types(schema: pa.Schema) -> dict[str, pa.DataType]:
    """The columns, and their types, that DuckDB cannot read: it would refuse the whole table."""
    return {field.name: field.type for field in schema if _is_unknown(field.type)}


def _is_unknown(kind: pa.DataType) -> bool:
    types = pa.types
    return (
        types.is_float16(kind)
        or types.is_decimal256(kind)
        or types.is_union(kind)
        or (types.is_dictionary(kind) and _is_unknown(kind.value_type))
        or any(_is_unknown(kind.field(number).type) for number in range(kind.num_fields))
    )


def as_readable(result: Any) -> Any:
    """A relation of DuckDB with the same columns, those of a type that Arrow has not as text."""
    kinds = [WITHOUT_ARROW.search(str(kind)) is not None for kind in result.types]
    if not any(kinds):
        return result
    return result.project(
        ", ".join(
            f"#{number}::VARCHAR" if is_text else f"#{number}"
            for number, is_text in enumerate(kinds, 1)
        )
    )


def python_values(name: str, column: pa.Array) -> list[Any]:
    """Convert a column to Python values.

    Raises: ClickException, with the column's name, for a time outside Python's range in a list or
    struct.
    """
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except (OverflowError, ValueError) as error:
        if not pa.types.is_timestamp(column.type) and not pa.types.is_date32(column.type):
            raise click.ClickException(
                f"column {name!r} has a value that Python cannot represent ({error}): select "
                f"{name}::varchar"
            ) from None
    return [_time(value) for value in column]


def _time(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return _time_text(value.value, value.type)


def _time_text(count: int, kind: pa.DataType) -> str:
    """Text of a time, given as a count of units or days since 1970."""
    is_date = pa.types.is_date32(kind)
    if abs(count) >= INFINITE["date" if is_date else "timestamp"]:
        return "infinity" if count > 0 else "-infinity"
    of_a_second = 1 if is_date else UNITS_A_SECOND[kind.unit]
    days, rest = (count, 0) if is_date else divmod(count, 86_400 * of_a_second)
    cycles, day = divmod(days + DAYS_TO_1970, DAYS_OF_400_YEARS)
    date = dt.date.fromordinal(day + 1)
    year = date.year + 400 * cycles
    text = f"{'-' * (year < 0)}{abs(year):04d}-{date:%m-%d}"
    if is_date:
        return text
    seconds, fraction = divmod(rest, of_a_second)
    digits = f".{fraction:0{len(str(of_a_second)) - 1}d}" if fraction else ""
    zone = "+00:00" if kind.tz else ""
    return f"{text} {seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{digits}{zone}"
