"""A topic as pyarrow's Dataset, for engines that say which columns they want when they run a query: duckdb, polars' `scan_pyarrow_dataset`.

Owner: an engine, which may scan it several times in one query. The plan is made once, so that all of its scans read the same rows; its lease ends with
`close`, or when the dataset is forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from tailrace.errors import TailraceError
from tailrace.scanning.columns import Column, arrow_schema
from tailrace.scanning.lease import Lease
from tailrace.scanning.options import Bounds, build_settings
from tailrace.scanning.planner import ScanPlan, plan
from tailrace.scanning.reader import read


class TopicDataset(ds.Dataset):  # type: ignore[misc]
    """The rows of a plan, under any of its columns. Nothing is read before it is scanned."""

    def __init__(self, made: ScanPlan) -> None:
        self._plan = made
        self._lease = Lease(made.bootstrap, made.lease, {r.key: r.start for r in made.ranges})
        self.close = weakref.finalize(self, self._lease.end)
        """Give the lease back."""
        self.error: TailraceError | None = None
        """What ended a scan: engines wrap it, and say less."""

    def __new__(cls, *_arguments: Any) -> TopicDataset:
        return ds.Dataset.__new__(cls)  # type: ignore[no-any-return]  # its own takes none

    @property
    def schema(self) -> pa.Schema:
        """Of all columns."""
        return self._plan.schema

    def scanner(self, columns: list[str] | None = None, filter: Any = None, **_options: Any) -> ds.Scanner:
        """A scan of these columns; what a filter looks at is read as well."""
        wanted = self._plan.columns if columns is None else self._needed(columns, filter)
        reader = pa.RecordBatchReader.from_batches(arrow_schema(wanted), self._batches(replace(self._plan, columns=wanted)))
        return ds.Scanner.from_batches(reader, columns=columns, filter=filter)

    def _needed(self, columns: list[str], condition: Any) -> tuple[Column, ...]:
        """Columns that are given, and those that the filter names: they are looked for in its text, where one too many does no harm."""
        text = "" if condition is None else str(condition)
        needed = tuple(column for column in self._plan.columns if column.name in columns or column.name in text)
        return needed or self._plan.columns[:1]

    def _batches(self, made: ScanPlan) -> Iterator[pa.RecordBatch]:
        try:
            for batch in read(made):
                self._lease.renew_when_due()
                yield batch
        except TailraceError as error:
            self.error = error
            raise


def topic_dataset(
    topic_or_directory: Any, bootstrap: str | None = None, columns: Any = None, start: Any = None, end: Any = None, **settings: Any
) -> TopicDataset:
    """What `tailrace.scan` of the same arguments reads, for several scans, each under the columns that it asks for. Raises as `scan`."""
    chosen = build_settings(settings)
    return TopicDataset(plan(topic_or_directory, bootstrap, columns, Bounds("start", start), Bounds("end", end), chosen))
