"""Values of rows that Arrow would store as other values, without an error.

pyarrow makes the integer 1 of `Decimal("1.5")`, a date of a datetime, and a struct of a dict that
has more keys than it. Such a row is refused. Floats may be rounded to their column's type.

Owner: pure.
Invariants: a value in which `found_in` finds nothing is stored as it was given, or pyarrow raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from functools import cache, partial
from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple

import pyarrow as pa


class Found(NamedTuple):
    """A value that would be stored as another one."""

    value: Any


Check = Callable[[Sequence[Any]], Found | None]
NONE = type(None)
TICKS_US = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 1}
"""Microseconds of a column's unit."""


def found_in(values: Sequence[Any], kind: pa.DataType) -> Found | None:
    """The first of the values that a column of this type would not keep. `pa.array` has taken
    them.
    """
    check = check_of(kind)
    return None if check is None else check(values)


@cache
def check_of(kind: pa.DataType) -> Check | None:
    """The check of a type's values. None: pyarrow refuses all that it does not keep."""
    types = pa.types
    if types.is_integer(kind):
        return partial(_among, {NONE, int}, _is_fraction)
    if types.is_date(kind):
        return partial(_among, {NONE, date, int}, _has_time)
    if types.is_timestamp(kind):
        return partial(_among, {NONE, datetime, int}, _is_finer_than_us)
    if types.is_time(kind):
        return partial(_among, {NONE, int}, partial(_is_other_time, TICKS_US[kind.unit]))
    if types.is_duration(kind):
        safe = {NONE, int} | ({timedelta} if TICKS_US[kind.unit] == 1 else set())
        return partial(_among, safe, partial(_is_other_duration, kind.unit))
    if types.is_struct(kind):
        return partial(_among_structs, {field.name: check_of(field.type) for field in kind})
    if types.is_map(kind):
        return partial(_among_maps, check_of(kind.key_type), check_of(kind.item_type))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        check = check_of(kind.value_type)
        return None if check is None else partial(_among_lists, check)
    return None


def may_lose(given: pa.DataType, kind: pa.DataType) -> bool:
    """True if Arrow's cast of a column to `kind` may store other values without an error."""
    types = pa.types
    if types.is_timestamp(given) or types.is_date64(given):
        return bool(types.is_date(kind) or types.is_time(kind))
    if types.is_struct(given) and types.is_struct(kind):
        names = {field.name for field in kind}
        return any(
            field.name not in names or may_lose(field.type, kind.field(field.name).type)
            for field in given
        )
    if types.is_map(given) and types.is_map(kind):
        return may_lose(given.key_type, kind.key_type) or may_lose(given.item_type, kind.item_type)
    inner = [getattr(each, "value_type", None) for each in (given, kind)]
    return None not in inner and may_lose(*inner)


# ---- single values -------------------------------------------------------------------------------


def _among(
    safe: set[type], is_altered: Callable[[Any], bool], values: Sequence[Any]
) -> Found | None:
    """The first altered one of the values whose types are not `safe`."""
    if safe.issuperset(map(type, values)):
        return None
    for value in values:
        given = value.as_py() if isinstance(value, pa.Scalar) else value
        if type(given) not in safe and is_altered(given):
            return Found(given)
    return None


def _is_fraction(value: Any) -> bool:
    """True for a number that has digits behind the point."""
    try:
        return not isinstance(value, Integral) and bool(value != int(value))
    except (TypeError, ValueError, OverflowError):
        return False  # no number: pyarrow has decided


def _has_time(value: Any) -> bool:
    """True for a datetime that is more than a date, or of another zone than UTC."""
    if not isinstance(value, datetime):
        return _is_fraction(value)
    return (
        value != value  # pandas' NaT
        or value.time() != time()
        or bool(value.utcoffset())
        or _is_finer_than_us(value)
    )


def _is_finer_than_us(value: Any) -> bool:
    """True for a pandas Timestamp with nanoseconds."""
    return bool(getattr(value, "nanosecond", 0)) or (
        not isinstance(value, datetime) and _is_fraction(value)
    )


def _is_other_time(tick_us: int, value: Any) -> bool:
    if not isinstance(value, time):
        return _is_fraction(value)
    return value.tzinfo is not None or value.microsecond % tick_us != 0


def _is_other_duration(unit: str, value: Any) -> bool:
    if not isinstance(value, timedelta):
        return _is_fraction(value)
    return value.microseconds % TICKS_US[unit] != 0 or (
        unit != "ns" and bool(getattr(value, "nanoseconds", 0))
    )


# ---- values that have values ---------------------------------------------------------------------


def _among_structs(checks: Mapping[str, Check | None], values: Sequence[Any]) -> Found | None:
    dicts = [value for value in values if isinstance(value, Mapping)]
    for value in dicts:
        if not checks.keys() >= value.keys():
            return Found(value)
    for name, check in checks.items():
        if check is not None:
            found = check([value.get(name) for value in dicts])
            if found is not None:
                return found
    return None


def _among_maps(keys: Check | None, items: Check | None, values: Sequence[Any]) -> Found | None:
    pairs = [
        pair
        for value in values
        if value is not None
        for pair in (value.items() if isinstance(value, Mapping) else value)
    ]
    found = None if keys is None else keys([key for key, _ in pairs])
    if found is None and items is not None:
        found = items([item for _, item in pairs])
    return found


def _among_lists(check: Check, values: Sequence[Any]) -> Found | None:
    return check(list(chain.from_iterable(value for value in values if value is not None)))
