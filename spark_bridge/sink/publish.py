"""The publication of a batch: sends the staged batches to their targets, under the identity in the
manifest. It can be repeated.

`publish` takes a `Carrier`, the destination of batches, which may be a connection or, later, a
transaction. Batches keep their bytes; only the producer, sequence and checksum in their header are
rewritten.

Owner: every driver that commits; any number may publish the same manifest at once.
Invariants:
- A batch with the same rows has the same sequence each time.
- A target's batches are sent in the order of the manifest.
Crash: appended batches are found in the targets' logs (`progress`), or recognised by their
partitions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import pyarrow as pa

from spark_bridge.sink.batch_sender import Lane
from spark_bridge.sink.decision_log import Manifest, Stage, Target
from spark_bridge.sink.staged_batches import BatchSource, writable
from tailrace.batch.arrow_codec import encode
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    CorruptBatchError,
    OffsetOutOfRangeError,
    SchemaMismatchError,
    TailraceError,
    UnknownTopicError,
)
from tailrace.format.batch_header import HEADER_BYTES, header_position, stamp_producer

_SCHEMA_ID_OFFSET = 76
OpenSource = Callable[..., BatchSource]
CrashPoint = Callable[[str], None]


class Carrier(Protocol):
    """Destination of batches."""

    def lane(self, topic: TopicInfo, partition: int, map_version: int) -> Lane:
        """Open a lane to one partition, for rows routed by this slot map (0: by none)."""
        ...

    def add(self, lane: Lane, data: bytearray) -> object:
        """Queue a batch behind the lane's others."""
        ...

    def drain(self) -> None:
        """Wait until all batches are durable."""
        ...


UNFINISHED_ADVICE = (
    "To write the whole batch again, what is there of it twice, delete what the sink keeps of the "
    "query "
    "(spark_bridge.sink.writer.forget_query) and start it again"
)


class StagedRowsLostError(TailraceError):
    """Staged rows of a publication cannot be read any more."""

    default_code = ErrorCode.INVALID_REQUEST


STAGED_ADVICE = "start the query again, which stages them again"


class TopicReplacedError(UnknownTopicError):
    """A target of a publication was deleted."""


def target_info(target: Target, infos: Mapping[str, TopicInfo]) -> TopicInfo:
    """Description of the target's topic.

    Raises: TopicReplacedError if the topic is gone, or is another one of the same name.
    """
    info = infos.get(target.topic)
    if info is None or info.topic_id.hex() != target.topic_id:
        context = "was deleted and created again" if info is not None else "was deleted"
        raise TopicReplacedError(f"topic {target.topic!r}, which a batch was staged for, {context}")
    return info


def publish(
    manifest: Manifest,
    infos: Mapping[str, TopicInfo],
    open_source: OpenSource,
    carrier: Carrier,
    present: Mapping[int, int] | None = None,
    crash_point: CrashPoint = lambda _name: None,
) -> int:
    """Publish what is not `present` (number of a target -> rows of it that are in its log already).
    Returns how many batches were sent.

    `infos`: of all topics of the manifest, as they are now. Raises UndecidedError when a partition
    cannot say whether it has a batch, TopicReplacedError, StagedRowsLostError, SchemaMismatchError,
    and what the carrier does.
    """
    lanes = [
        carrier.lane(target_info(target, infos), target.partition, target.map_version)
        for target in manifest.targets
    ]
    count = 0
    for step, data, schema_message in _staged(manifest, infos, open_source, present or {}):
        _stamp(
            data,
            manifest.identity_in(step.target),
            lanes[step.target],
            step.sequence,
            schema_message,
        )
        carrier.add(lanes[step.target], data)
        count += 1
        if count == 1:
            crash_point("in_publish")
    carrier.drain()
    return count


class _Step(NamedTuple):
    """A batch to send."""

    first: int
    """First offset of the batch in the staging topic."""
    rows: int
    target: int
    sequence: int


def _steps(manifest: Manifest, present: Mapping[int, int]) -> Iterator[tuple[Stage, list[_Step]]]:
    """The batches to send, by partition of a staging topic."""
    row = [-target.skip for target in manifest.targets]
    for stage in manifest.stages:
        steps = []
        for first, rows, target in stage.batches:
            if row[target] >= present.get(target, 0):
                steps.append(_Step(first, rows, target, row[target]))
            row[target] += rows
        if steps:
            yield stage, steps


def _staged(
    manifest: Manifest,
    infos: Mapping[str, TopicInfo],
    open_source: OpenSource,
    present: Mapping[int, int],
) -> Iterator[tuple[_Step, bytearray, bytes]]:
    """(step, the batch's bytes, its schema) of each batch to send, in order.

    Raises: StagedRowsLostError.
    """
    for stage, steps in _steps(manifest, present):
        info = infos.get(stage.topic)
        if info is None or info.topic_id.hex() != stage.topic_id:
            raise StagedRowsLostError(
                f"the staging topic {stage.topic!r} was deleted: {STAGED_ADVICE}"
            )
        source = open_source(info, stage.partition, headers_only=False)
        frames = source.frames(steps[0].first, steps[-1].first + steps[-1].rows)
        for step in steps:
            try:  # between them lie batches of attempts that failed
                frame = next(
                    (frame for frame in frames if frame.header.base_offset >= step.first), None
                )
            except (OffsetOutOfRangeError, CorruptBatchError) as error:
                raise StagedRowsLostError(
                    f"staged rows cannot be read ({error.detail}): {STAGED_ADVICE}"
                ) from None
            if (
                frame is None
                or frame.header.base_offset != step.first
                or frame.header.record_count != step.rows
                or frame.data is None
            ):
                raise StagedRowsLostError(
                    f"staged rows from offset {step.first} of {stage.topic}-{stage.partition} are "
                    f"gone: {STAGED_ADVICE}"
                )
            yield step, writable(frame.data), info.schema_message


def _stamp(
    data: bytearray, identity: tuple[int, int], lane: Lane, sequence: int, schema_message: bytes
) -> None:
    producer_id, epoch = identity
    if lane.topic.schema_message != schema_message:
        raise SchemaMismatchError(
            f"the schema of topic {lane.topic.name!r} has changed since its rows were staged; "
            "restart the query to stage them anew"
        )
    with memoryview(data) as view:
        struct.pack_into(
            "<I", view, header_position(view) + _SCHEMA_ID_OFFSET, lane.topic.schema_id
        )
        stamp_producer(
            view,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            seed=lane.topic.seeds[lane.partition],
        )


def question(manifest: Manifest, number: int, topic: TopicInfo) -> bytearray:
    """A batch that a partition never appends: its sequence lies behind a gap. The refusal says
    whether the partition knows the manifest's producer.
    """
    target = manifest.targets[number]
    row = pa.RecordBatch.from_arrays(
        [pa.nulls(1, field.type) for field in topic.schema], schema=topic.schema
    )
    seed = topic.seeds[target.partition]
    data = encode(
        row,
        schema_id=topic.schema_id,
        seed=seed,
        compression="none",
        first_timestamp_us=0,
        max_timestamp_us=0,
    )
    behind_a_gap = target.rows - target.skip + 1
    producer_id, epoch = manifest.identity_in(number)
    with memoryview(data) as view:
        stamp_producer(
            view,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=behind_a_gap,
            seed=seed,
        )
    return data


def progress(
    manifest: Manifest,
    infos: Mapping[str, TopicInfo],
    ends: Mapping[int, tuple[int, int]],
    open_source: OpenSource,
) -> dict[int, int]:
    """Number of a target -> how many of its rows are in its log under the manifest's identity; 0
    where its topic is gone.

    `ends`: number of a target -> (beginning, end) of its log. Raises OffsetOutOfRangeError where
    retention has removed what would say so.
    """
    found: dict[int, int] = {}
    for number, target in enumerate(manifest.targets):
        info = infos.get(target.topic)
        if info is None or info.topic_id.hex() != target.topic_id or number not in ends:
            found[number] = 0
            continue
        beginning, end = ends[number]
        rows = 0
        for frame in open_source(info, target.partition, headers_only=True).frames(
            max(beginning, target.start), end
        ):
            header = frame.header
            if (header.producer_id, header.producer_epoch) == manifest.identity_in(number):
                rows = header.base_sequence + header.record_count
        if beginning > target.start and not rows:
            raise OffsetOutOfRangeError(
                f"it is unknown whether batch {manifest.batch_id} is in "
                f"{target.topic}-{target.partition}: the records from offset {target.start} on "
                f"were deleted up to {beginning} before the batch was finished. "
                f"{UNFINISHED_ADVICE}"
            )
        found[number] = rows
    return found


assert HEADER_BYTES == 136, "_SCHEMA_ID_OFFSET is for a header of 136 bytes: change both"
