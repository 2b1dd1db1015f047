"""Rules of schema evolution: which columns of a schema come from which of the version before.

A typed topic has a list of schema versions. Each column of a version continues a column of the
version before, or is new there:

    same name, same or wider type                    continues it
    metadata `tailrace.alias` names a column that
    the new version has under no name                continues it under another name
    otherwise                                        is new: null, or `tailrace.default`, in older
                                                     rows

A column of the old version that no column continues is dropped. A name that comes back later is a
new column: old values do not reappear. The table RULES says which change each mode of
schema.compatibility allows.

Owner: pure, without an Arrow library. The controller checks alterations by it, readers and
producers convert rows by it.

Invariants:
- Each column of a version is continued by one column at most.
- `sources(versions, k)` for the newest `k` are its own columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from tailrace.core.errors import InvalidSchemaError
from tailrace.format.record_batch import flatbuffer
from tailrace.format.record_batch.arrow_metadata import METADATA_BYTES_MAX, NodeSpec, read_schema

ALIAS_KEY = "tailrace.alias"
"""Metadata of a column: the name that it had in the version before."""
DEFAULT_KEY = "tailrace.default"
"""Metadata of a column: its value in rows older than it, as JSON."""
DEFAULT_MAX_BYTES = 4096
SHOWN_MAX = 300
"""Characters of a name or of names that a sentence shows."""
MODES = ("backward", "forward", "full", "none")
TIME_COLUMN = "timestamp"
_INT, _FLOAT, _TEXT, _BOOL, _DATE, _TIMESTAMP = 2, 3, 5, 6, 8, 10
_TIME_KIND = (_TIMESTAMP, 2, "UTC")
_NAMES = {
    _FLOAT: "float", 4: "binary", _TEXT: "string", _BOOL: "bool", 7: "decimal", _DATE: "date",
    9: "time", 11: "interval", 12: "list", 13: "struct", 15: "fixed_size_binary",
    16: "fixed_size_list", 17: "map", 18: "duration",
}  # fmt: skip


class Step(Enum):
    """A change of one column between two versions."""

    ADD = "add a column"
    DROP = "drop a column"
    REORDER = "reorder columns"
    RENAME = "rename a column"
    WIDEN = "widen a type"
    RETYPE = "change a type otherwise"


RULES: dict[Step, tuple[str, ...]] = {
    Step.ADD: MODES,
    Step.DROP: MODES,
    Step.REORDER: MODES,
    Step.RENAME: ("backward", "none"),
    Step.WIDEN: ("backward", "none"),
    Step.RETYPE: ("none",),
}
"""The modes that allow each change. Every column is nullable, so that adding and dropping harm no
reader of either version.
"""


class Field(NamedTuple):
    """A column of a schema."""

    name: str
    shape: tuple[Any, ...]
    """Its type: that of two columns is equal if their shapes are."""
    bits: int
    """Bits of a value, 0 for a type without a fixed size."""
    alias: str | None = None
    default: str | None = None
    """JSON."""

    @property
    def kind(self) -> tuple[int | str, ...]:
        """The type's number and details (see `NodeSpec.kind`)."""
        kind: tuple[int | str, ...] = self.shape[0][0]
        return kind

    @property
    def type_name(self) -> str:
        """The type, as a sentence names it."""
        number, *details = self.kind
        if number == _INT:
            return f"{'' if details[0] else 'u'}int{self.bits}"
        if number == _FLOAT:
            return f"float{self.bits}"
        if number == _TIMESTAMP:
            zone = f", {details[1]}" if details[1] else ""
            return f"timestamp[{('s', 'ms', 'us', 'ns')[int(details[0])]}{zone}]"
        if number == _DATE:
            return f"date{self.bits}"
        return _NAMES.get(int(number), f"type {number}")


class Source(NamedTuple):
    """The origin of a column's values in rows of an older version."""

    column: int
    """The place of the column there, -1: there is none."""
    is_widened: bool = False
    default: Any = None
    """The value of all rows if there is no column."""


@lru_cache(maxsize=64)
def fields_of(message: bytes) -> tuple[Field, ...]:
    """The columns of an encapsulated Schema message. Raises ArrowMetadataError."""
    nodes = read_schema(message).nodes
    starts = [place for place, node in enumerate(nodes) if node.top_level]
    described = _metadata_of(message)
    return tuple(
        _field(nodes[start:end], start, described[number])
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(nodes)], strict=True))
    )


def _field(nodes: Sequence[NodeSpec], start: int, metadata: dict[str, str]) -> Field:
    shape = tuple(
        (
            node.kind,
            node.buffers,
            node.list_size,
            node.parent_index - start if node.parent_index >= 0 else -1,
            "" if node.top_level else node.name,
        )
        for node in nodes
    )
    bits = max((buffer.bit_width for buffer in nodes[0].buffers), default=0)
    return Field(nodes[0].name, shape, bits, metadata.get(ALIAS_KEY), metadata.get(DEFAULT_KEY))


def _metadata_of(message: bytes) -> list[dict[str, str]]:
    """The metadata of each column with the keys of this module."""
    schema = flatbuffer.root(memoryview(message)[8:]).table(2)
    assert schema is not None, "read_schema has accepted it"
    found = []
    for position in schema.tables(1):
        field = schema.table_at(position)
        entries = {}
        for at in field.tables(6):
            entry = field.table_at(at)
            key = entry.text(0, METADATA_BYTES_MAX) or ""
            if key in (ALIAS_KEY, DEFAULT_KEY):
                entries[key] = entry.text(1, METADATA_BYTES_MAX) or ""
        found.append(entries)
    return found


def is_wider(old: Field, new: Field) -> bool:
    """True if every value of the old type has the same value in the new one, which is another."""
    if old.shape == new.shape or len(old.shape) > 1 or len(new.shape) > 1:
        return False
    before, after = old.kind, new.kind
    if before[0] == after[0] == _INT:
        return new.bits > old.bits and (before[1] == after[1] or bool(after[1]))
    if before[0] == after[0] == _FLOAT:
        return new.bits > old.bits
    return before[0] == _DATE and after == _TIME_KIND


def continued(old: Sequence[Field], new: Sequence[Field]) -> list[int]:
    """The place in `old` of the column that each one of `new` continues, -1: it is new."""
    places = {field.name: place for place, field in enumerate(old)}
    names = {field.name for field in new}
    found = []
    for field in new:
        place = places.get(field.name, -1)
        if place < 0 and field.alias is not None and field.alias not in names:
            place = places.get(field.alias, -1)
        if place >= 0 and old[place].shape != field.shape and not is_wider(old[place], field):
            place = -1
        found.append(place)
    return found


@lru_cache(maxsize=256)
def sources(versions: tuple[bytes, ...], number: int) -> tuple[Source, ...]:
    """The origin of each column of the newest of `versions` (messages, the oldest first) in rows
    of version `number`.
    """
    newest = fields_of(versions[-1])
    found = [Source(place) for place in range(len(newest))]
    after = newest
    for version in range(len(versions) - 2, number - 1, -1):
        before = fields_of(versions[version])
        places = continued(before, after)
        for column, source in enumerate(found):
            if source.column < 0:
                continue
            field, place = after[source.column], places[source.column]
            if place < 0:
                found[column] = Source(-1, default=value_of(newest[column], field.default))
            else:
                is_widened = source.is_widened or before[place].shape != field.shape
                found[column] = Source(place, is_widened)
        after = before
    return tuple(found)


def value_of(field: Field, default: str | None) -> Any:
    """The value of a default in JSON for a column of this type. None where it has none, or does
    not fit, which `check` refuses.
    """
    if default is None:
        return None
    try:
        value = orjson.loads(default)
    except orjson.JSONDecodeError:
        return None
    return value if _fits(field, value) else None


def defaults_of(message: bytes) -> dict[str, Any]:
    """Column -> its default, of those that have one."""
    return {
        field.name: value
        for field in fields_of(message)
        if (value := value_of(field, field.default)) is not None
    }


def _fits(field: Field, value: Any) -> bool:
    number = field.kind[0]
    if number == _INT and isinstance(value, int) and not isinstance(value, bool):
        low = -(1 << field.bits - 1) if field.kind[1] else 0
        return low <= value <= low + (1 << field.bits) - 1
    if number == _FLOAT:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return (number == _TEXT and isinstance(value, str)) or (
        number == _BOOL and isinstance(value, bool)
    )


def steps_between(old: Sequence[Field], new: Sequence[Field]) -> list[tuple[Step, str, str]]:
    """The changes: (change, column, what it was and is)."""
    places = continued(old, new)
    before = {field.name: field for field in old}
    found = []
    for field, place in zip(new, places, strict=True):
        if place < 0:
            was = before.get(field.name) or before.get(field.alias or "")
            if was is not None and was.shape != field.shape:
                types = f"from {was.type_name} to {field.type_name}"
                found.append((Step.RETYPE, field.name, types))
            else:
                found.append((Step.ADD, field.name, field.type_name))
            continue
        was = old[place]
        if was.name != field.name:
            found.append((Step.RENAME, field.name, f"from {was.name}"))
        if was.shape != field.shape:
            types = f"from {was.type_name} to {field.type_name}"
            found.append((Step.WIDEN, field.name, types))
    retyped = {name for step, name, _ in found if step is Step.RETYPE}
    kept = {place for place in places if place >= 0}
    found += [
        (Step.DROP, field.name, field.type_name)
        for place, field in enumerate(old)
        if place not in kept and field.name not in retyped
    ]
    order = [place for place in places if place >= 0]
    if order != sorted(order):
        moved = next(
            field.name
            for field, place, least in zip(new, places, _running_max(places), strict=True)
            if 0 <= place < least
        )
        found.append((Step.REORDER, moved, "to another place"))
    return found


def _running_max(places: Sequence[int]) -> list[int]:
    largest, found = -1, []
    for place in places:
        found.append(largest)
        largest = max(largest, place)
    return found


def check(
    old: bytes, new: bytes, mode: str, key_column: str | None = None
) -> list[tuple[Step, str, str]]:
    """Check an alteration from one schema message to another, and return its changes.
    `key_column`: the column with the keys of a compacted topic, which stays as it is.

    Raises InvalidSchemaError that names the column, and what to do.
    """
    before, after = fields_of(old), fields_of(new)
    steps = steps_between(before, after)
    if key_column is not None:
        _check_key(before, after, key_column)
    for step, name, detail in steps:
        if mode not in RULES[step]:
            raise InvalidSchemaError(_refusal(step, name, detail, mode))
    _check_time(before, after)
    known = {field.name: field.alias for field in before}
    aliases = dict[str, str]()
    for field in after:
        if field.default is not None:
            _check_default(field)
        alias = field.alias
        if alias is None or alias in (field.name, known.get(field.name)):
            continue  # of itself, or said in the version before
        if alias not in known:
            raise InvalidSchemaError(
                f"column {field.name!r} has the alias {alias[:SHOWN_MAX]!r}, and the topic has no "
                f"column {alias[:SHOWN_MAX]!r}; it has {', '.join(known)[:SHOWN_MAX]}"
            )
        if field.name in known:
            raise InvalidSchemaError(
                f"column {field.name!r} has the alias {alias!r}, and exists already with values of "
                "its own: rename to a new name, or leave the alias out"
            )
        if any(other.name == alias for other in after):
            raise InvalidSchemaError(
                f"column {field.name!r} has the alias {alias!r}, and the schema still has a column "
                f"of that name: leave one of the two out"
            )
        if alias in aliases:
            raise InvalidSchemaError(
                f"columns {aliases[alias]!r} and {field.name!r} both have the alias {alias!r}: "
                "leave one of the two out"
            )
        aliases[alias] = field.name
    return steps


def _refusal(step: Step, name: str, detail: str, mode: str) -> str:
    if step is Step.RETYPE:
        return (
            f"column {name!r} changes its type {detail}, and stored rows cannot be read so: keep "
            "the type, or give the column another name"
        )
    return (
        f"column {name!r}: to {step.value} ({detail}) is refused with schema.compatibility={mode}; "
        f"it is allowed with {' or '.join(RULES[step])}"
    )


def _check_key(before: Sequence[Field], after: Sequence[Field], name: str) -> None:
    """Stored keys and new ones are compared as they are."""
    had, has = (
        next((field.shape for field in fields if field.name == name), None)
        for fields in (before, after)
    )
    if had != has:
        raise InvalidSchemaError(
            f"column {name!r} has the keys of the topic (key.column): it can be neither dropped "
            "nor renamed, and its type stays"
        )


def _check_time(before: Sequence[Field], after: Sequence[Field]) -> None:
    """The time of a row is a column of every version, or of none."""
    had, has = (
        any(field.name == TIME_COLUMN and field.kind == _TIME_KIND for field in fields)
        for fields in (before, after)
    )
    if had != has:
        raise InvalidSchemaError(
            f"column {TIME_COLUMN!r} has the time of each row: it can be "
            f"{'neither dropped nor renamed' if had else 'given only when the topic is created'}"
        )


def _check_default(field: Field) -> None:
    text = field.default or ""
    if len(text.encode()) > DEFAULT_MAX_BYTES:
        raise InvalidSchemaError(
            f"column {field.name!r} has a default of more than {DEFAULT_MAX_BYTES} bytes"
        )
    if value_of(field, text) is None:
        raise InvalidSchemaError(
            f"column {field.name!r} has the default {text[:60]!r}, which is no JSON value of its "
            f"type {field.type_name}; integers, floats, booleans and strings can have a default"
        )
