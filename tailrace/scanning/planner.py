"""Scan planner: makes the plan of a scan (`tailrace.scanning.scan_plan`). It asks an appliance, or
reads the directories of one that is stopped.

Invariants:
- A plan's ranges are fixed when it is made, up to the settled end at that time. Every reader of it
  gets the same rows.
- A range names a directory only if it is the appliance's own, not a copy or another host's. A
  reader without that directory reads from the appliance.
"""

from __future__ import annotations

import difflib
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tailrace.admin.admin import Admin
from tailrace.client.config.settings import default_bootstrap
from tailrace.client.topics.list_offsets import ready_offsets
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import (
    InvalidRequestError,
    NotReachableError,
    OffsetOutOfRangeError,
    PartitionOutOfRangeError,
    StorageError,
    UnknownTopicError,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.format.schema import from_message, to_message
from tailrace.scanning import retention_lease
from tailrace.scanning.batch_decoder import time_in
from tailrace.scanning.columns import chosen_columns
from tailrace.scanning.options import AtTime, Bounds, ScanSettings, resolve
from tailrace.scanning.scan_plan import PartitionRange, ScanPlan
from tailrace.scanning.sources import data_dirs as directories
from tailrace.scanning.sources.local_source import LocalSource

if TYPE_CHECKING:
    pass

LEASE_ATTEMPTS = 3
GUESS_TIMEOUT_MS = 3_000


def plan(
    source: Any,
    bootstrap: str | None,
    columns: Any,
    start: Bounds,
    end: Bounds,
    settings: ScanSettings,
    *,
    with_lease: bool = True,
) -> ScanPlan:
    """Plan a scan of a topic or a directory. Raises TailraceError."""
    if not directories.is_directory(source):
        if not isinstance(source, str) or not source or not source.isprintable():
            raise InvalidRequestError(
                f"scan takes a topic's name or DATA_DIR/topic, not {source!r:.100}"
            )
        return _of_appliance(
            source,
            bootstrap or default_bootstrap(),
            columns,
            start,
            end,
            settings,
            with_lease=with_lease,
        )
    path = os.path.abspath(os.fspath(source))
    found = directories.find_partitions(path, settings.partitions)
    data_dir = os.path.dirname(next(iter(found.values()))[0])
    if not directories.is_in_use(data_dir):
        return _of_directory(found, columns, start, end, settings)
    address = bootstrap or directories.address_of(data_dir) or default_bootstrap()
    first = next(iter(found.values()))[1]
    numbers = settings.partitions if settings.partitions is not None else tuple(found)
    made = _of_appliance(
        first.topic,
        address,
        columns,
        start,
        end,
        replace(settings, partitions=numbers),
        with_lease=with_lease,
        in_directory=data_dir,
    )
    if made.ranges and made.ranges[0].topic_id != first.topic_id:
        raise _another_appliance(data_dir, address)
    return made


def _another_appliance(
    data_dir: str, address: str, reason: str = "is another appliance"
) -> InvalidRequestError:
    return InvalidRequestError(
        f"an appliance runs on {data_dir}, but the one at {address} {reason}; give its address "
        "with bootstrap=, so that only settled offsets are read"
    )


# ---- a running appliance -------------------------------------------------------------------------


def _of_appliance(
    topic: str,
    bootstrap: str,
    columns: Any,
    start: Bounds,
    end: Bounds,
    settings: ScanSettings,
    *,
    with_lease: bool,
    in_directory: str = "",
) -> ScanPlan:
    try:
        # The default address may not be that of the appliance on the directory, so the wait is
        # short.
        patience_ms = min(settings.request_timeout_ms, GUESS_TIMEOUT_MS) if in_directory else None
        admin = Admin(
            bootstrap,
            client_id=settings.client_id,
            request_timeout_ms=settings.request_timeout_ms,
            connect_timeout_ms=patience_ms,
        )
        with admin:
            data_dirs = (
                directories.own_directories(admin)
                if settings.from_files is not False or in_directory
                else []
            )
            if in_directory and in_directory not in data_dirs:
                raise _another_appliance(in_directory, bootstrap)
            data_dirs = [] if settings.from_files is False else data_dirs
            info = topic_info(admin, topic)
            for attempt in range(LEASE_ATTEMPTS):
                ranges = _ranges(admin, info, start, end, settings)
                name = f"scan-{uuid.uuid4().hex}" if with_lease and ranges else ""
                try:
                    if name and not retention_lease.acquire(
                        admin,
                        name,
                        {r.key: r.start for r in ranges},
                        topic_ids={info.name: info.topic_id},
                    ):
                        name = ""
                    break
                except OffsetOutOfRangeError:
                    # Retention moved the beginning between plan and lease, each time.
                    if attempt == LEASE_ATTEMPTS - 1:
                        raise
    except NotReachableError as error:
        raise (
            _another_appliance(in_directory, bootstrap, f"does not respond ({error.detail})")
            if in_directory
            else error
        ) from None
    return plan_of(
        info, admin.settings.bootstrap_servers, ranges, data_dirs, columns, settings, name
    )


def plan_of(
    info: TopicInfo,
    bootstrap: str,
    ranges: Iterable[PartitionRange],
    data_dirs: list[str],
    columns: Any,
    settings: ScanSettings,
    lease_name: str = "",
    schema_id: int | None = None,
) -> ScanPlan:
    """A plan of these ranges of a topic. `data_dirs` come from `own_directories`. `schema_id`: the
    version of the schema that rows are returned in; None: the newest.

    Raises InvalidSettingError, StorageError, UnsupportedBatchError if there is no such version.
    """
    found = tuple(
        replace(r, directory=directories.directory_of(r.topic, r.partition, r.topic_id, data_dirs))
        for r in ranges
    )
    settings = with_key_of_topic(settings, info.settings)
    if settings.from_files and (elsewhere := [r for r in found if not r.directory]):
        where = f"{info.name}-{elsewhere[0].partition}"
        raise StorageError(
            f"the files of {where} cannot be opened here, which from_files=True requires; leave it "
            "out to read over ZeroMQ"
        )
    schema, message = info.schema, info.schema_message
    if schema_id is not None and schema_id != info.schema_id:
        schema = info.history.schema(schema_id)
        message = to_message(schema)
    chosen = chosen_columns(info.name, schema, columns, typed=info.typed)
    return ScanPlan(
        bootstrap, info.name, info.typed, message, chosen, found, settings, lease_name,
        info.schema_id if schema_id is None else schema_id, versions_of(info),
    )  # fmt: skip


def versions_of(info: TopicInfo) -> tuple[tuple[int, bytes], ...]:
    """The versions of a topic's schema, as a plan has them."""
    if len(info.schema_ids) == 1:
        return ()
    return tuple(zip(info.history.ids, info.history.messages, strict=True))


def with_key_of_topic(settings: ScanSettings, configs: Mapping[str, Any]) -> ScanSettings:
    """The settings with the topic's key.column, if the latest is asked for by no other one."""
    column = configs.get("key.column")
    if not settings.latest or settings.key_column is not None or not column:
        return settings
    return replace(settings, key_column=column)


def topic_info(admin: Admin, topic: str) -> TopicInfo:
    try:
        return admin.topic_info([topic])[topic]
    except UnknownTopicError:
        names = admin.list_topics()
    near = difflib.get_close_matches(topic, names, 1, 0.5)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"existing topics are {', '.join(names[:10])}"
        if names
        else "the appliance has no topics"
    )
    raise UnknownTopicError(f"there is no topic {topic!r}; {hint}")


def _ranges(
    admin: Admin, info: TopicInfo, start: Bounds, end: Bounds, settings: ScanSettings
) -> list[PartitionRange]:
    count = len(info.partitions)
    numbers = range(count) if settings.partitions is None else settings.partitions
    for number in numbers:
        if number >= count:
            raise PartitionOutOfRangeError(
                f"topic {info.name!r} has partitions 0 to {count - 1}, not {number}"
            )
    keys = [TopicPartition(info.name, number) for number in numbers]
    for bounds in (start, end):
        bounds.check_partitions(info.name, numbers)
    times = {
        (bounds.name, key): bound
        for bounds in (start, end)
        for key in keys
        if isinstance(bound := bounds.of(key), AtTime)
    }
    found = ready_offsets(admin.offsets, keys, "latest", settings.request_timeout_ms)
    at_times = offsets_at(admin, times, settings) if times else {}
    result = []
    for key in keys:
        first, behind = found[key]["beginning"], found[key]["end"]
        result.append(_range(info.topic_id, key, start, end, first, behind, at_times))
    return [r for r in result if r.start < r.end]


def _range(
    topic_id: bytes,
    key: TopicPartition,
    start: Bounds,
    end: Bounds,
    first: int,
    behind: int,
    at_times: Mapping[tuple[str, TopicPartition], int | None],
) -> PartitionRange:
    begin, until = (
        resolve(b.name, b.of(key), key, first, behind, at_times.get((b.name, key)))
        for b in (start, end)
    )
    if begin > until and isinstance(start.of(key), int) and isinstance(end.of(key), int):
        raise InvalidRequestError(
            f"start is {begin} and end is {until} of {key.topic}-{key.partition}; give an end at "
            "or above start"
        )
    return PartitionRange(key.topic, topic_id, key.partition, begin, until)


def offsets_at(
    admin: Admin, times: Mapping[tuple[str, TopicPartition], AtTime], settings: ScanSettings
) -> dict[tuple[str, TopicPartition], int | None]:
    """The first record at or after each time, as in `Consumer.offsets_for_times`."""
    from tailrace.scanning.sources.remote_source import TimeLookup

    source = TimeLookup(admin.settings.bootstrap_servers, settings)
    try:
        result: dict[tuple[str, TopicPartition], int | None] = {}
        for name in ("start", "end"):
            requested = {key: at.timestamp_us for (of, key), at in times.items() if of == name}
            result.update(((name, key), at) for key, at in source.offsets(requested).items())
        return result
    finally:
        source.close()


# ---- a stopped appliance's directory -------------------------------------------------------------


def _of_directory(
    found: Mapping[int, tuple[str, Any]],
    columns: Any,
    start: Bounds,
    end: Bounds,
    settings: ScanSettings,
) -> ScanPlan:
    if settings.from_files is False:
        raise InvalidRequestError(
            "no appliance runs on this directory, so only its files can be read; leave out "
            "from_files=False"
        )
    first = next(iter(found.values()))[1]
    topic, decision = first.topic, first.decision
    settings = with_key_of_topic(settings, {} if decision is None else decision.given)
    newest = decision.schema_id if decision is not None else max(first.schemas)
    if newest not in first.schemas:
        newest = max(first.schemas)
    message = first.schemas[newest]
    typed = decision.typed if decision is not None else "@" in topic
    current = from_message(message)
    for bounds in (start, end):
        bounds.check_partitions(topic, found)
    ranges = []
    for directory, known in found.values():
        files = LocalSource(directory, known, headers_only=False, schema=current)
        key = files.key
        behind, aborted = directories.decided_end(files)
        files = LocalSource(directory, known, headers_only=False, schema=current, aborted=aborted)
        at_times: dict[tuple[str, TopicPartition], int | None] = {}
        for bounds in (start, end):
            bound = bounds.of(key)
            if isinstance(bound, AtTime):
                at_times[bounds.name, key] = _first_of_files(
                    files, bound.timestamp_us, behind, typed, settings
                )
        made = _range(known.topic_id, key, start, end, known.log_start_offset, behind, at_times)
        if made.start < made.end:
            ranges.append(replace(made, directory=directory, aborted=aborted))
    schemas = {
        number: each for _, known in found.values() for number, each in known.schemas.items()
    }
    versions = tuple(sorted(item for item in schemas.items() if item[0] <= newest))
    return ScanPlan(
        "",
        topic,
        typed,
        message,
        chosen_columns(topic, current, columns, typed=typed),
        tuple(ranges),
        settings,
        schema_id=newest,
        versions=versions if typed and len(versions) > 1 else (),
    )


def _first_of_files(
    files: LocalSource, when_us: int, behind: int, typed: bool, settings: ScanSettings
) -> int | None:
    def first_in(header: Any, data: Any, schema: pa.Schema) -> int | None:
        return time_in(
            header, data, schema, when_us, settings.max_decompressed_batch_bytes, typed=typed
        )

    return directories.offset_for_time(files, when_us, behind, first_in)
