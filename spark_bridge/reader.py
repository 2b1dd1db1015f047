"""One Spark task: reads its plan (`tailrace.scanning`), from the log's files where they are on the executor's host, and gives its batches as Arrow.

Invariants: every offset of the plan's range is returned once, in order, and no other.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from tailrace.scanning.columns import KAFKA_COLUMNS, arrow_schema
from tailrace.scanning.lease import Lease
from tailrace.scanning.planner import ScanPlan
from tailrace.scanning.reader import read


def kafka_schema(include_headers: bool) -> pa.Schema:
    """Columns of a default-schema topic, as Spark's Kafka source names them."""
    return arrow_schema([column for column in KAFKA_COLUMNS if include_headers or column.name != "headers"])


def read_task(task: ScanPlan) -> Iterator[pa.RecordBatch]:
    """The rows of a task, with the plan's columns in that order; renews its lease while it reads. Raises TailraceError."""
    lease = Lease(task.bootstrap, task.lease, {r.key: r.start for r in task.ranges})
    for batch in read(task):
        lease.renew_when_due()
        yield batch
