"""TopicDataset: a topic as a pyarrow Dataset, for engines that choose columns per query.

Examples are duckdb, and polars' `scan_pyarrow_dataset`.

Owner: an engine, which may scan it several times in one query. The plan is made once, so all scans
read the same rows. Its lease ends with `close`, or when the dataset is garbage collected.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from tailrace.core.errors import TailraceError
from tailrace.scanning.columns import Column, arrow_schema
from tailrace.scanning.latest.latest_offsets import LatestOffsets, check_key, find_latest
from tailrace.scanning.latest.latest_rows import latest_rows
from tailrace.scanning.options import Bounds, build_settings
from tailrace.scanning.planner import plan
from tailrace.scanning.reader import read
from tailrace.scanning.retention_lease import Lease
from tailrace.scanning.scan_plan import ScanPlan


class TopicDataset(ds.Dataset):  # type: ignore[misc]
    """The rows of a plan, with any of its columns. Nothing is read before a scan."""

    def __init__(self, made: ScanPlan) -> None:
        self._plan = made
        self._lease = Lease(
            made.bootstrap, made.lease, {r.key: r.start for r in made.ranges}, made.topic_ids
        )
        self.close = weakref.finalize(self, self._lease.end)
        """End the lease."""
        self._latest: LatestOffsets | None = None
        """With `latest`: found by the first scan, for all."""
        self.error: TailraceError | None = None
        """The error that ended a scan. Engines wrap it and drop details."""
        if made.settings.latest:
            check_key(made)

    def __new__(cls, *_arguments: Any) -> TopicDataset:
        return ds.Dataset.__new__(cls)  # type: ignore[no-any-return]  # takes no arguments

    @property
    def schema(self) -> pa.Schema:
        """The schema of all columns."""
        return self._plan.schema

    def scanner(
        self, columns: list[str] | None = None, filter: Any = None, **_options: Any
    ) -> ds.Scanner:
        """A scan of these columns. Columns of the filter are read as well."""
        requested = self._plan.columns if columns is None else self._needed(columns, filter)
        reader = pa.RecordBatchReader.from_batches(
            arrow_schema(requested), self._batches(replace(self._plan, columns=requested))
        )
        return ds.Scanner.from_batches(reader, columns=columns, filter=filter)

    def _needed(self, columns: list[str], condition: Any) -> tuple[Column, ...]:
        """The given columns and those in the filter's text, where an extra match does no harm."""
        text = "" if condition is None else str(condition)
        needed = tuple(
            column for column in self._plan.columns if column.name in columns or column.name in text
        )
        return needed or self._plan.columns[:1]

    def _batches(self, made: ScanPlan) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._read(made):
                self._lease.renew_when_due()
                yield batch
        except TailraceError as error:
            self.error = error
            raise

    def _read(self, made: ScanPlan) -> Iterator[pa.RecordBatch]:
        if not made.settings.latest:
            yield from read(made)
            return
        if self._latest is None:
            self._latest = find_latest(made, read, self._lease.renew_when_due)
        yield from latest_rows(made, self._latest, read)


def topic_dataset(
    topic_or_directory: Any,
    bootstrap: str | None = None,
    columns: Any = None,
    start: Any = None,
    end: Any = None,
    **settings: Any,
) -> TopicDataset:
    """A dataset of the rows that `tailrace.scan` reads with these arguments. Raises as `scan`."""
    chosen = build_settings(settings)
    return TopicDataset(
        plan(
            topic_or_directory,
            bootstrap,
            columns,
            Bounds("start", start),
            Bounds("end", end),
            chosen,
        )
    )
