"""The decision log of a sink: a topic of one partition, in which a record is valid only if its
writer had read the newest valid record.

Two drivers of the same query may append at once, and the order of the log says who was first. Each
record names the offset of the record that its writer had read (`on`). All readers go through the
log in the same order, accept a record that names the newest valid one, and skip every other. So the
log is a compare-and-set with nothing but append (the idea of conditional writes by log position:
Balakrishnan et al., Tango, SOSP 2013).

    {"on": offset, "kind": "claim" | "begin" | "done" | "void", "run", "fenced",
     "published": batch id, "producer": id, "epoch", "manifest" (of a begin)}

Owner: every driver that commits; the valid record decides.
Invariants:
- At most one manifest is open.
- `published` never falls.
- An epoch of the producer identifies one manifest only.
Crash: an appended record counts also if its writer never saw the acknowledgement.
Retention: records below the newest one that closed a manifest are deleted now and then. The first
remaining record is valid.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from spark_bridge.sink.batch_sender import BatchSender
from spark_bridge.sink.staged_batches import BatchSource, decode_values
from tailrace.admin.admin import Admin
from tailrace.batch.arrow_codec import encode
from tailrace.client.new_topic import NewTopic
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core.errors import RecordTooLargeError, TopicExistsError, UnknownTopicError
from tailrace.core.topic_partition import TopicPartition
from tailrace.kernel.reference_arrow import default_rows
from tailrace.protocol.frame import Api

logger = logging.getLogger("tailrace.spark")
UNKNOWN_ROWS = -1
FENCED_MAX = 100
"""Most fenced runs (those that another run took over from) that are remembered."""
EPOCH_MAX = 32_767
KEEP_RECORDS = 48
"""Records below the newest one that closed a manifest are deleted when there are more than this."""
MADE_TIMEOUT_S = 30.0
CREATED_POLL_S = 0.01
LOG_CONFIGS = {"retention.ms": -1, "durability": "disk", "segment.bytes": 8 << 20}


@dataclass(frozen=True, slots=True)
class Target:
    """A partition that a batch is published to."""

    topic: str
    topic_id: str
    """Topic id, hexadecimal."""
    partition: int
    map_version: int
    """Version of the slot map by which rows were routed; 0: none."""
    start: int
    """The log's end before the publication began; the batch lies at or above it."""
    rows: int
    skip: int = 0
    """Rows published under an earlier epoch; sequence 0 is the row after them."""
    identity: tuple[int, int] | None = None
    """Producer and epoch of the rows behind `skip`, where the partition had forgotten the
    manifest's producer; None elsewhere.
    """

    @property
    def key(self) -> tuple[str, str, int]:
        """The target's topic name, topic id and partition."""
        return self.topic, self.topic_id, self.partition


@dataclass(frozen=True, slots=True)
class Stage:
    """A partition of a staging topic, and the batches in it."""

    topic: str
    topic_id: str
    partition: int
    batches: tuple[tuple[int, int, int], ...]
    """(first offset, rows, number of the target), ascending."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The publication of one batch, with everything needed to repeat it. Its batches are in the
    order of `stages`.
    """

    batch_id: int
    producer_id: int
    epoch: int
    targets: tuple[Target, ...]
    stages: tuple[Stage, ...]

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Manifest:
        """Decode the result of `to_json`."""
        stages = tuple(
            Stage(s["topic"], s["topic_id"], s["partition"], _together(s["batches"]))
            for s in given["stages"]
        )
        targets = tuple(
            Target(**{**t, "identity": tuple(t["identity"]) if t.get("identity") else None})
            for t in given["targets"]
        )
        return cls(given["batch_id"], given["producer_id"], given["epoch"], targets, stages)

    def to_json(self) -> dict[str, Any]:
        """Encode the manifest for a record. Batches are stored by column and offsets as gaps: a
        third of the bytes after compression.
        """
        stages = [{**asdict(stage), "batches": _apart(stage.batches)} for stage in self.stages]
        return {**asdict(self), "stages": stages}

    def identity_in(self, number: int) -> tuple[int, int]:
        """Producer and epoch for this target."""
        return self.targets[number].identity or (self.producer_id, self.epoch)


def _apart(batches: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    ends = [0, *(first + rows for first, rows, _ in batches)]
    gaps = [first - end for (first, _, _), end in zip(batches, ends, strict=False)]
    return [gaps, [rows for _, rows, _ in batches], [target for _, _, target in batches]]


def _together(columns: Sequence[Sequence[int]]) -> tuple[tuple[int, int, int], ...]:
    result, position = [], 0
    for gap, rows, target in zip(*columns, strict=True):
        result.append((position + gap, rows, target))
        position += gap + rows
    return tuple(result)


@dataclass(frozen=True, slots=True)
class State:
    """The sink's state according to its log."""

    at: int = -1
    """The offset of the newest valid record; -1: there is none."""
    run: str = ""
    fenced: tuple[str, ...] = ()
    """Runs of the query that a later run has taken over from."""
    published: int = -1
    """The newest published batch."""
    rows: int = UNKNOWN_ROWS
    """Rows of that batch."""
    producer_id: int = -1
    epoch: int = -1
    manifest: Manifest | None = None
    """The manifest that is decided and not known to be published."""


def follow(state: State, offset: int, record: dict[str, Any]) -> State:
    """The state after one more record; unchanged if that is not valid."""
    if record["on"] != state.at:
        return state
    manifest = Manifest.from_json(record["manifest"]) if record["kind"] == "begin" else None
    if record["kind"] == "claim":
        manifest = state.manifest
    rows = record.get("rows", UNKNOWN_ROWS)
    return State(
        offset,
        record["run"],
        tuple(record["fenced"]),
        record["published"],
        rows,
        record["producer"],
        record["epoch"],
        manifest,
    )


def taken_over(state: State, run: str) -> State:
    """The state with this run as its owner."""
    if run == state.run:
        return state
    fenced = (*state.fenced, state.run)[-FENCED_MAX:] if state.run else state.fenced
    return replace(state, run=run, fenced=fenced)


class DecisionLog(Protocol):
    """Storage of decisions."""

    is_of_query: bool
    """Its batches are a stream's, which come one after the other."""

    def read(self) -> State:
        """Read the current state."""
        ...

    def append(self, seen: State, kind: str, following: State) -> bool:
        """Decide, unless another decision came after `seen`; return False then."""
        ...

    def trim(self) -> None:
        """Delete records that are not needed any more."""
        ...


class MemoryLog:
    """The log of a batch write without a name: no later job could continue it."""

    is_of_query = False

    def __init__(self) -> None:
        self._state = State()

    def read(self) -> State:
        """See `DecisionLog`."""
        return self._state

    def append(self, seen: State, kind: str, following: State) -> bool:
        """See `DecisionLog`."""
        self._state = replace(following, at=seen.at + 1)
        return True

    def trim(self) -> None:
        """Do nothing: there are no records to delete."""


class TopicLog:
    """The log of a query, in a topic."""

    def __init__(
        self,
        admin: Admin,
        sender: BatchSender,
        topic: str,
        make_source: Callable[[TopicInfo, int], BatchSource],
        *,
        is_of_query: bool = True,
    ) -> None:
        self.is_of_query = is_of_query
        self._admin = admin
        self._sender = sender
        self._info = made(admin, NewTopic(topic, 1, LOG_CONFIGS))
        self._lane = sender.lane(self._info, 0)
        self._source = make_source(self._info, 0)
        self._state = State()
        self._position = -1
        self._first = 0
        self._closed_at = -1
        """The newest record that closed a manifest."""

    def read(self) -> State:
        """See `DecisionLog`. Raises TailraceError."""
        with self._decision():
            return self._read()

    @contextmanager
    def _decision(self) -> Iterator[None]:
        """Translate errors of the log's topic into errors that name the log."""
        try:
            yield
        except UnknownTopicError:
            raise UnknownTopicError(
                f"{self._info.name!r}, the log of this query's published batches, was deleted "
                "while a batch was committed. Whether that batch is in its topic is unknown: "
                "look there before you start the query again, which writes the batch once more"
            ) from None
        except RecordTooLargeError:
            raise RecordTooLargeError(
                "the batch has too many pieces for a record of the sink's log: each task has "
                "one for each partition that it writes to. Use fewer tasks (coalesce before "
                "writing, or a lower spark.sql.shuffle.partitions), or smaller batches "
                "(maxOffsetsPerTrigger)"
            ) from None

    def _read(self) -> State:
        found = self._admin.offsets({TopicPartition(self._info.name, 0): "latest"})[
            TopicPartition(self._info.name, 0)
        ]
        if self._position < 0:
            self._position = self._first = found["beginning"]
        if self._position < found["end"]:
            for offset, value in decode_values(
                self._source, self._info, self._position, found["end"]
            ):
                if (record := self._decoded(offset, value)) is not None:
                    self._take(offset, record)
            self._position = found["end"]
        return self._state

    def _decoded(self, offset: int, value: bytes | None) -> dict[str, Any] | None:
        """Decode a record; None for one that the sink has not written, which all readers skip
        alike.
        """
        try:
            record = json.loads(zlib.decompress(value or b""))
            return record if record["on"] < offset else None
        except (zlib.error, ValueError, TypeError, KeyError) as error:
            logger.warning(
                "sink_log_stranger topic=%s offset=%d reason=%r", self._info.name, offset, error
            )
            return None

    def _take(self, offset: int, record: dict[str, Any]) -> None:
        if self._state.at < 0 and offset == self._first and record["on"] < offset:
            record["on"] = -1  # earlier records are deleted; the first is valid
        before, self._state = self._state, follow(self._state, offset, record)
        if self._state is not before and record["kind"] in ("done", "void"):
            self._closed_at = offset

    def append(self, seen: State, kind: str, following: State) -> bool:
        """See `DecisionLog`. Raises TailraceError; RecordTooLargeError for a manifest that no
        record holds.
        """
        with self._decision():
            return self._append(seen, kind, following)

    def _append(self, seen: State, kind: str, following: State) -> bool:
        manifest = following.manifest if kind == "begin" else None
        record = {
            "on": seen.at,
            "kind": kind,
            "run": following.run,
            "fenced": following.fenced,
            "published": following.published,
            "rows": following.rows,
            "producer": following.producer_id,
            "epoch": following.epoch,
            "manifest": None if manifest is None else manifest.to_json(),
        }
        rows = default_rows(
            [0], [None], [zlib.compress(json.dumps(record, separators=(",", ":")).encode())], None
        )
        data = encode(
            rows,
            schema_id=self._info.schema_id,
            seed=self._info.seeds[0],
            compression="none",
            first_timestamp_us=0,
            max_timestamp_us=0,
        )
        appended = self._sender.add(self._lane, data)
        self._sender.drain()
        self._read()
        return self._state.at == appended.base_offset

    def trim(self) -> None:
        """See `DecisionLog`. Raises TailraceError."""
        if self._closed_at - self._first > KEEP_RECORDS and self._state.at >= self._closed_at:
            self._admin.delete_records({TopicPartition(self._info.name, 0): self._closed_at})


def made(admin: Admin, topic: NewTopic) -> TopicInfo:
    """The log's topic, created if it is missing.

    Raises: TailraceError.
    """
    deadline = time.monotonic() + MADE_TIMEOUT_S
    while topic.name not in (found := known(admin, [topic.name])):
        try:
            admin.create_topics(topic)
        except (
            TopicExistsError
        ):  # another task is making it, which takes the appliance some milliseconds
            if time.monotonic() > deadline:
                raise
            time.sleep(CREATED_POLL_S)
    return found[topic.name]


def known(admin: Admin, names: Sequence[str]) -> dict[str, TopicInfo]:
    """Descriptions of those of these topics that exist.

    Raises: TailraceError.
    """
    answer = admin._run_steps(admin._call(Api.METADATA, {"topics": list(names)}))
    return {
        described["name"]: TopicInfo(described)
        for described in answer["topics"]
        if "topic_id" in described
    }
