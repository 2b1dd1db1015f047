"""`spark_bridge.scan`: a topic as a DataFrame whose tasks pass the log's Arrow batches to the JVM
through `mapInArrow`.

Spark's Python data sources cost more for each batch than `mapInArrow`, and take no part in the
planner's choice of tasks. The price: the plan is made when `scan` is called, and there are no
options as text. Plans and their readers are those of `tailrace.scanning`.

Owner: the driver makes the plan and holds its lease; each task renews it while it reads.
Invariants: the DataFrame has the rows that existed when `scan` was called, in every action and
every retried task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException, PySparkTypeError
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from spark_bridge.environment import this_python
from spark_bridge.source.planner import LEASE_MS
from spark_bridge.source.tasks import divided
from tailrace.admin.admin import Admin
from tailrace.core.errors import InvalidSettingError, NotSupportedError
from tailrace.scanning.latest.latest_offsets import LatestOffsets, find_latest
from tailrace.scanning.latest.latest_rows import latest_rows
from tailrace.scanning.options import Bounds, build_settings
from tailrace.scanning.planner import plan
from tailrace.scanning.reader import read
from tailrace.scanning.retention_lease import Lease, acquire
from tailrace.scanning.scan_plan import ScanPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASKS_WITHOUT_A_CONTEXT = 8
"""Number of tasks where the session does not tell its number of cores (Spark Connect)."""


def scan(
    spark: SparkSession,
    topic: Any,
    bootstrap: str | None = None,
    columns: Sequence[str] | None = None,
    start: Any = None,
    end: Any = None,
    *,
    tasks: int | None = None,
    **settings: Any,
) -> DataFrame:
    """Return the topic's present records as a DataFrame.

    `topic`, `bootstrap`, `columns`, `start`, `end` and the settings are those of `tailrace.scan`.
    `columns=None` leaves out the headers of a topic without a schema. `tasks`: the number of tasks,
    each with a range of offsets; None: the session's number of cores.

    Rows that are first read more than ten minutes after this call may have been removed by
    retention. The action then fails with OffsetOutOfRangeError.

    Raises:
    - TailraceError as `tailrace.scan`.
    - InvalidSettingError.
    - NotSupportedError for a column that Spark has no type for.
    """
    if tasks is not None and (isinstance(tasks, bool) or not isinstance(tasks, int) or tasks < 1):
        raise InvalidSettingError(
            f"tasks is {tasks!r:.100}; it takes a whole number from 1 on, or None for the "
            "number of cores"
            "there are cores"
        )
    chosen = build_settings({"client_id": "spark", **settings})
    made = plan(topic, bootstrap, columns, Bounds("start", start), Bounds("end", end), chosen)
    if columns is None and not made.typed:
        made = _with_columns(made, [name for name in made.schema.names if name != "headers"])
    _lease_longer(made)
    schema = spark_schema(made.schema)
    latest = find_latest(made, read) if made.settings.latest else None
    pieces = divided(made, tasks or cores(spark), *([1] if tasks else []))
    target = to_arrow_schema(schema, timezone="UTC")
    with this_python(spark):
        return spark.range(0, len(pieces), 1, len(pieces)).mapInArrow(
            _reader(made, pieces, latest, target), schema
        )


def cores(spark: SparkSession) -> int:
    """Number of tasks that run at once."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except PySparkException:  # Spark Connect has none
        return TASKS_WITHOUT_A_CONTEXT


def spark_schema(schema: pa.Schema) -> StructType:
    """Raises NotSupportedError, which names the column that Spark has no type for."""
    for field in schema:
        try:
            from_arrow_schema(pa.schema([field]), prefer_timestamp_ntz=False)
        except PySparkTypeError:
            raise NotSupportedError(
                f"column {field.name!r} is {field.type}, for which Spark has no type: name the "
                "other columns in columns"
            ) from None
    return from_arrow_schema(schema, prefer_timestamp_ntz=False)


def _with_columns(made: ScanPlan, names: list[str]) -> ScanPlan:
    return replace(made, columns=tuple(column for column in made.columns if column.name in names))


def _lease_longer(made: ScanPlan) -> None:
    if made.lease:
        with Admin(made.bootstrap, request_timeout_ms=made.settings.request_timeout_ms) as admin:
            acquire(admin, made.lease, {r.key: r.start for r in made.ranges}, LEASE_MS)


def _reader(
    made: ScanPlan, pieces: list[ScanPlan], latest: LatestOffsets | None, target: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make a task's function: it yields the rows of the pieces whose numbers come to it.

    It renews the lease of all pieces. A lease has one offset for each partition, and that of its
    own piece would release the pieces before it to retention.
    """
    bootstrap, name, offsets = made.bootstrap, made.lease, {r.key: r.start for r in made.ranges}

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        lease = Lease(bootstrap, name, offsets)
        for numbers in batches:
            for number in numbers.column(0).to_pylist():
                piece = pieces[number]
                for batch in read(piece) if latest is None else latest_rows(piece, latest, read):
                    lease.renew_when_due()
                    yield batch if batch.schema.equals(target) else _as(batch, target)

    return rows


def _as(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """Cast to Spark's types: no views, dictionaries, or nanoseconds."""
    columns = [
        column.cast(field.type, safe=False)
        for column, field in zip(batch.columns, target, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=target)
