"""Errors for commits that the package of a table format rejects.

Owner: the export's sinks.

Invariants:
- The error names the column if one is the reason, and then does not suggest a disk failure.
- Backtraces of compiled packages are removed.
"""

from __future__ import annotations

import pyarrow as pa

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
