"""Plans a Spark read: the offsets that it covers, and their division into tasks. Pure decisions;
the given `Admin` describes the topics.

`spark_bridge.source.read_options` documents the options. The division follows Kafka's
KafkaOffsetRangeCalculator: first by maxRecordsPerPartition, then in proportion to the sizes until
there are minPartitions. Without minPartitions, large ranges are divided for the cores of this host,
and one task reads small ranges of one topic, for a task costs some 13 ms.

Invariants:
- Every offset between start and end is in exactly one task.
- The plan fixes the ranges, so that a retried task reads the same rows.
- Tasks renew the lease of the whole read. A lease of their own part would release what the others
  have yet to read.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spark_bridge.source.read_options import (
    EARLIEST,
    KNOWN_OPTIONS,
    LATEST,
    OffsetsByPartition,
    ReadOptions,
    check_batch_options,
    parse_options,
)
from spark_bridge.source.topic_columns import columns_of, kafka_schema, load_topics
from tailrace.admin.admin import Admin
from tailrace.client.topics.list_offsets import ready_offsets
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import (
    InvalidSettingError,
    OffsetOutOfRangeError,
    PartitionOutOfRangeError,
)
from tailrace.core.log import logger
from tailrace.core.topic_partition import TopicPartition
from tailrace.scanning import retention_lease as leases
from tailrace.scanning.options import AtTime, ScanSettings
from tailrace.scanning.planner import offsets_at, plan_of
from tailrace.scanning.scan_plan import PartitionRange, ScanPlan
from tailrace.scanning.sources.data_dirs import own_directories

if TYPE_CHECKING:
    from tailrace.scanning.latest.latest_offsets import LatestOffsets

__all__ = [
    "EARLIEST", "KNOWN_OPTIONS", "LATEST", "LEASE_MS", "ReadOptions", "ReadTask",
    "check_batch_options", "columns_of", "divide", "kafka_schema", "load_topics",
    "parse_options", "plan", "plan_leased",
]  # fmt: skip

LEASE_MS = 600_000
LEASE_ATTEMPTS = 3
TASK_OFFSETS = 262_144
"""Smallest range into which a range is divided for the cores. Smaller ranges of one topic share a
task.
"""


@dataclass(frozen=True, slots=True)
class ReadTask:
    """The ranges of one Spark task."""

    plan: ScanPlan
    leased: Mapping[TopicPartition, int]
    """The part of the whole read's lease that covers this task's partitions."""
    fail_on_data_loss: bool = True
    latest: LatestOffsets | None = None
    """With view=latest: the offsets of this task's rows."""


def plan(
    admin: Admin, options: ReadOptions, infos: Mapping[str, TopicInfo]
) -> list[PartitionRange]:
    """The ranges to read, without empty ones. Raises InvalidSettingError for offsets outside the
    log, PartitionOutOfRangeError.
    """
    keys = [
        TopicPartition(topic, partition)
        for topic, info in infos.items()
        for partition in _partitions(options, info)
    ]
    known = ready_offsets(admin.offsets, keys, "latest", options.request_timeout_ms)
    available = {key: (found["beginning"], found["end"]) for key, found in known.items()}
    starts, ends = (bounds_of(admin, options, available, which) for which in ("start", "end"))
    return [
        PartitionRange(key.topic, infos[key.topic].topic_id, key.partition, starts[key], ends[key])
        for key in keys
        if starts[key] < ends[key]
    ]


def _partitions(options: ReadOptions, info: TopicInfo) -> Sequence[int]:
    count, chosen = len(info.partitions), options.requested.get(info.name)
    if chosen is None:
        return range(count)
    if chosen[-1] >= count:
        raise PartitionOutOfRangeError(
            f"option assign names partition {chosen[-1]} of topic {info.name!r}, which has 0 to "
            f"{count - 1}"
        )
    return chosen


def bounds_of(
    admin: Admin,
    options: ReadOptions,
    available: Mapping[TopicPartition, tuple[int, int]],
    which: str,
) -> dict[TopicPartition, int]:
    """The beginning (`which` is "start") or end ("end") of each partition's range. As in Kafka's
    source, options by time go before options by offset.
    """
    is_start = which == "start"
    times = options.starting_ms if is_start else options.ending_ms
    if times is not None:
        return _bounds_by_time(admin, options, available, which, times)
    name = f"{which}ingOffsets"
    given, default = (options.starting, EARLIEST) if is_start else (options.ending, LATEST)
    lenient = not options.fail_on_data_loss
    found = {
        key: _resolve(given, key, *bounds, name, default, lenient=lenient)
        for key, bounds in available.items()
    }
    if isinstance(given, dict):
        _check_complete(name, given, available)
    return found


def _bounds_by_time(
    admin: Admin,
    options: ReadOptions,
    available: Mapping[TopicPartition, tuple[int, int]],
    which: str,
    times: int | dict[TopicPartition, int],
) -> dict[TopicPartition, int]:
    name = f"{which}ingTimestamp" if isinstance(times, int) else f"{which}ingOffsetsByTimestamp"
    if isinstance(times, dict):
        _check_complete(name, times, available)
    of_each = dict.fromkeys(available, times) if isinstance(times, int) else times
    asked = {(which, key): AtTime(of_each[key] * 1000) for key in available}
    at_times = offsets_at(admin, asked, scan_settings(options)) if asked else {}
    found = {}
    for key, (beginning, end) in available.items():
        offset = at_times.get((which, key))
        if offset is None and which == "start" and not options.no_record_is_latest:
            raise InvalidSettingError(
                f"no record of {key.topic}-{key.partition} has the time {of_each[key]} or a "
                f"later one, as {name} asks; with startingOffsetsByTimestampStrategy=latest "
                "nothing is read of it"
            )
        found[key] = end if offset is None else min(max(offset, beginning), end)
    return found


def _check_complete(
    name: str, given: Mapping[TopicPartition, int], available: Mapping[TopicPartition, object]
) -> None:
    """Check that every partition is named, as Kafka's source does: a forgotten one would be read
    completely.
    """
    forgotten, unknown = sorted(set(available) - set(given)), sorted(set(given) - set(available))
    if forgotten:
        raise InvalidSettingError(
            f"{name} leaves out {forgotten[0].topic}-{forgotten[0].partition}: name all "
            "partitions that are read (-2 means earliest and -1 latest), or none"
        )
    if unknown:
        raise InvalidSettingError(
            f"{name} names {unknown[0].topic}-{unknown[0].partition}, which this read does not "
            "cover"
        )


def scan_settings(options: ReadOptions) -> ScanSettings:
    """Settings of the tasks' scans."""
    return ScanSettings(
        client_id=options.client_id,
        max_decompressed_batch_bytes=options.max_decompressed_batch_bytes,
        request_timeout_ms=options.request_timeout_ms,
        skip_damaged=options.skip_damaged, from_files=options.from_files,
        validate_batches=options.validate_batches, **_latest_settings(options),
    )  # fmt: skip


def _latest_settings(options: ReadOptions) -> dict[str, Any]:
    """The settings of view=latest."""
    if not options.is_latest:
        return {}
    given = {"latest": True, "key_column": options.key_column}
    size = options.latest_memory_bytes
    return given if size is None else {**given, "latest_memory_bytes": size}


def plan_leased(
    admin: Admin,
    options: ReadOptions,
    infos: Mapping[str, TopicInfo],
    columns: list[str],
    lease: str,
) -> list[ReadTask]:
    """Plan the tasks, under a lease that keeps the ranges from retention for LEASE_MS; tasks renew
    it.

    Returns: no tasks if there is nothing to read.
    Raises: InvalidSettingError, OffsetOutOfRangeError.
    """
    for attempt in range(LEASE_ATTEMPTS):
        ranges = plan(admin, options, infos)
        try:
            if ranges and not leases.acquire(
                admin, lease, {r.key: r.start for r in ranges}, LEASE_MS
            ):
                lease = ""
            break
        except OffsetOutOfRangeError:
            if (
                attempt == LEASE_ATTEMPTS - 1
            ):  # retention moved the beginning between plan and lease each time
                raise
    settings = scan_settings(options)
    data_dirs = own_directories(admin) if ranges and options.from_files is not False else []
    starts = {r.key: r.start for r in ranges}
    tasks = []
    for topic, info in infos.items():
        # The directories are looked for once, not for each part.
        whole = plan_of(
            info,
            options.bootstrap,
            [r for r in ranges if r.topic == topic],
            data_dirs,
            columns,
            settings,
            lease,
        )
        latest = _latest(whole) if options.is_latest and whole.ranges else None
        share = sum(r.end - r.start for r in whole.ranges) / max(
            1, sum(r.end - r.start for r in ranges)
        )
        for part in divide(
            whole.ranges, options.min_partitions, options.max_records_per_partition, share, _cores()
        ):
            leased = {r.key: starts[r.key] for r in part}
            tasks.append(
                ReadTask(
                    replace(whole, ranges=part),
                    leased,
                    options.fail_on_data_loss,
                    None if latest is None else latest.part(part),
                )
            )
    return tasks


def _latest(whole: ScanPlan) -> LatestOffsets:
    """The latest offsets of each key in a topic: the driver reads all keys, so that the tasks agree
    on them.
    """
    from tailrace.scanning.latest.latest_offsets import find_latest
    from tailrace.scanning.reader import read

    lease = leases.Lease(whole.bootstrap, whole.lease, {r.key: r.start for r in whole.ranges})
    return find_latest(whole, read, lease.renew_when_due)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def divide(
    ranges: Sequence[PartitionRange],
    least: int | None,
    offsets_max: int | None,
    share: float,
    cores: int,
) -> list[tuple[PartitionRange, ...]]:
    """The ranges of each task. `least`: minPartitions, `offsets_max`: maxRecordsPerPartition, None
    where they are not given; `share`: of the whole read that these ranges are.
    """
    total = sum(r.end - r.start for r in ranges)
    if not total:
        return []
    if least is None and offsets_max is None:
        requested = min(share * cores, total / TASK_OFFSETS)
        return _united(
            [
                piece
                for r in ranges
                for piece in _pieces(r, round(requested * (r.end - r.start) / total))
            ],
            total,
            cores,
        )
    pieces = [
        piece
        for r in ranges
        for piece in _pieces(r, -((r.start - r.end) // offsets_max) if offsets_max else 1)
    ]
    requested = (least or 0) * share
    if len(pieces) < requested:
        pieces = [
            part
            for piece in pieces
            for part in _pieces(piece, round(requested * (piece.end - piece.start) / total))
        ]
    return [(piece,) for piece in pieces]


def _pieces(r: PartitionRange, count: int) -> list[PartitionRange]:
    """Divide this range into `count` ranges of nearly the same size."""
    size = r.end - r.start
    count = min(max(1, count), size)
    edges = [r.start + size * n // count for n in range(count + 1)]
    return [replace(r, start=start, end=end) for start, end in itertools.pairwise(edges)]


def _united(
    pieces: list[PartitionRange], total: int, cores: int
) -> list[tuple[PartitionRange, ...]]:
    """Neighbours in one task, while that has fewer than TASK_OFFSETS, or than a core's part of a
    small read.
    """
    enough = min(TASK_OFFSETS, -(-total // cores))
    tasks: list[list[PartitionRange]] = []
    room = 0
    for piece in pieces:
        if room <= 0:
            tasks.append([])
            room = enough
        tasks[-1].append(piece)
        room -= piece.end - piece.start
    return [tuple(task) for task in tasks]


def _resolve(
    option: OffsetsByPartition,
    key: TopicPartition,
    beginning: int,
    end: int,
    name: str,
    default: int,
    *,
    lenient: bool = False,
) -> int:
    requested = (
        {"earliest": EARLIEST, "latest": LATEST}[option]
        if isinstance(option, str)
        else option.get(key, default)
    )
    if requested == EARLIEST:
        return beginning
    if requested == LATEST:
        return end
    if not beginning <= requested <= end:
        where = (
            f"{name} asks for offset {requested} of {key.topic}-{key.partition}, which holds "
            f"{beginning} to {end}"
        )
        if not lenient:
            raise InvalidSettingError(
                f"{where}; with failOnDataLoss=false the remaining offsets are read"
            )
        logger.warning("spark_read_less %s", where)
        return min(max(requested, beginning), end)
    return requested
