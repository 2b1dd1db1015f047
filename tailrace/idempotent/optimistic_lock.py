"""Optimistic locking: an update that changes a row only in the version that was read.

A column of the row counts its versions. A transaction that read version 3 updates "where the
version is 3" to version 4. It finds out if another was faster. A repeated update finds version 4
and changes nothing (Kung and Robinson, "On Optimistic Methods for Concurrency Control", 1981).

Crash: it is one statement, in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.core.errors import InvalidRequestError
from tailrace.core.validation import INT64_MAX, mapping_of, whole
from tailrace.idempotent.dbapi import identifier, joined


def update_if_version(
    connection: Any,
    table: str,
    key: Any,
    version: int,
    values: Mapping[str, Any],
    *,
    key_column: str = "id",
    version_column: str = "version",
    paramstyle: str | None = None,
) -> bool:
    """Write `values` (column -> value) to the row `key` if its version is still `version`, and
    increment the version. `key`: the value of `key_column`, or a dict of column -> value for a key
    of several columns. Returns False if the row has another version or is missing. Then read it
    again.

    The caller commits. Raises InvalidRequestError, InvalidSettingError (a name that needs quotes),
    and what the driver raises.
    """
    columns = mapping_of("values", values, '{"balance": 10}')
    keys = dict(key) if isinstance(key, Mapping) else {key_column: key}
    whole("version", version, -INT64_MAX, INT64_MAX - 1)
    if not keys or version_column in columns:
        raise InvalidRequestError(
            "key names at least one column, and values leave out the version, which is counted up "
            "by itself"
        )
    written = ", ".join(f"{identifier('a column', name)} = ?" for name in columns)
    where = " AND ".join(f"{identifier('a column', name)} = ?" for name in (*keys, version_column))
    statement = (
        f"UPDATE {identifier('table', table, 2)} SET "
        f"{identifier('version_column', version_column)} = "
        f"?{', ' if written else ''}{written} WHERE {where}"
    )
    return (
        joined(connection, paramstyle).change(
            statement, version + 1, *columns.values(), *keys.values(), version
        )
        == 1
    )
