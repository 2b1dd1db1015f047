"""TableChange: what a callback of a table is called with."""

from __future__ import annotations

from typing import Any, NamedTuple


class TableChange(NamedTuple):
    """A change of one key."""

    key: Any
    """The key, by `key_deserializer`."""
    value: Any
    """The new value, by `value_deserializer`; None: the key was deleted."""
    partition: int
    offset: int
    """The offset of the record that changed it; -1: the log no longer has the key's record."""
    timestamp: int
    """The record's time, milliseconds since 1970 UTC; -1 without a record."""
