"""Errors for commits that the package of a table format rejects.

Owner: the export's sinks.

Invariants:
- The error names the column if one is the reason, and then does not suggest a disk failure.
- Backtraces of compiled packages are removed.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.errors import NotSupportedError, StorageError, TailraceError

BACKTRACE = "\n   0: "


def sink_error(path: str, package: str, error: Exception, unfit: pa.Field | None) -> TailraceError:
    """The error for a rejected commit. `unfit` is the column whose
    type the format lacks, if any.
    """
    if unfit is not None:
        return NotSupportedError(
            f"{path}: {package} has no type for column {unfit.name!r}, which is {unfit.type}; "
            "export the other columns (--columns), or to format parquet"
        )
    return StorageError(
        f"{path}: {package} rejected the commit: {str(error).partition(BACKTRACE)[0]}"
    )


def retyped_error(path: str, field: pa.Field, kind: pa.DataType) -> NotSupportedError:
    """The error for rows with a column that the table has as a `kind` that cannot hold them."""
    return NotSupportedError(
        f"{path}: column {field.name!r} is {kind} in the table and {plain(field.type)} in the "
        "topic now, and the table cannot hold its values; export to another directory, or the "
        "other columns (--columns)"
    )


def plain(kind: pa.DataType) -> pa.DataType:
    """A type, or the one with short offsets that tables have in its place."""
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.utf8()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    return kind


def keeps(column: pa.ChunkedArray, kind: pa.DataType) -> bool:
    """True if each value of a column is the same in another type."""
    if _is_text(column.type) != _is_text(kind):
        return bool(column.null_count == len(column))
    try:
        back = column.cast(kind).cast(column.type)
    except pa.ArrowException:
        return False
    same = pc.equal(column, back)
    if pa.types.is_floating(column.type):
        same = pc.or_(same, pc.is_nan(column))
    return bool(pc.all(same).as_py() is not False)


def _is_text(kind: pa.DataType) -> bool:
    return plain(kind) in (pa.utf8(), pa.binary())
