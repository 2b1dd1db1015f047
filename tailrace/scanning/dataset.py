"""A topic as pyarrow's Dataset, for engines that ask for columns and filters when they run a query: duckdb, polars' `scan_pyarrow_dataset`.

Owner: an engine, which may scan it several times in one query. The plan is made once, so that all of its scans read the same rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from tailrace.scanning.columns import Column, arrow_schema
from tailrace.scanning.planner import ScanPlan
from tailrace.scanning.reader import read


class TopicDataset(ds.Dataset):  # type: ignore[misc]
    """The rows of a plan, under any of its columns. Nothing is read before it is scanned."""

    def __init__(self, made: ScanPlan, columns: tuple[Column, ...]) -> None:
        """`columns`: those that there are, whatever the plan's are."""
        self._plan = made
        self._columns = columns

    def __new__(cls, *_arguments: Any) -> TopicDataset:
        return ds.Dataset.__new__(cls)  # type: ignore[no-any-return]  # its own takes none

    @property
    def schema(self) -> pa.Schema:
        """Of all columns."""
        return arrow_schema(self._columns)

    def scanner(self, columns: list[str] | None = None, filter: Any = None, **_options: Any) -> ds.Scanner:  # noqa: A002
        """A scan of these columns; what a filter looks at is read as well."""
        wanted = self._columns if columns is None else self._needed(columns, filter)
        reader = pa.RecordBatchReader.from_batches(arrow_schema(wanted), read(replace(self._plan, columns=wanted)))
        return ds.Scanner.from_batches(reader, columns=columns, filter=filter)

    def _needed(self, columns: list[str], condition: Any) -> tuple[Column, ...]:
        """Columns that are given, and those that the filter names: it is looked for in its text, where a name too many does no harm."""
        text = "" if condition is None else str(condition)
        needed = tuple(column for column in self._columns if column.name in columns or column.name in text)
        return needed or self._columns[:1]
