"""What is said when the package of a table format refuses a commit.

Owner: the export's targets.
Invariants: a column is named where one is the reason, and no disk is suspected then; backtraces of compiled packages are left out.
"""

from __future__ import annotations

import pyarrow as pa

from tailrace.errors import NotSupportedError, StorageError, TailraceError

BACKTRACE = "\n   0: "


def refusal(path: str, package: str, error: Exception, unfit: pa.Field | None) -> TailraceError:
    """`unfit`: the column whose type the format has not, if that is why."""
    if unfit is not None:
        return NotSupportedError(
            f"{path}: {package} has no type for column {unfit.name!r}, which is {unfit.type}: name the other columns (--columns), or export to format parquet"
        )
    return StorageError(f"{path}: {package} refuses the commit: {str(error).partition(BACKTRACE)[0]}")
