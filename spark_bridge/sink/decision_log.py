"""What a sink has decided: its log, a topic of one partition, in which a record counts only if it was made with the newest one before it in view.

Two drivers of the same query may append at once; the order of the log says who was first. Each record names the offset of the record that its writer had seen
(`on`); readers, who all go through the log in the same order, take one that names the newest valid record, and pass over every other. So the log compares and
sets, with nothing but append (the idea of conditional writes by log position: Balakrishnan et al., Tango, SOSP 2013).

    {"on": offset, "kind": "claim" | "begin" | "done" | "void", "run", "fenced", "published": batch id, "producer": id, "epoch", "manifest" (of a begin)}

Owner: whoever commits; the record that is valid decides. Invariants: at most one manifest is open; `published` never falls; an epoch of the producer is the
identity of one manifest only. Crash: an appended record that its writer never saw accepted is as valid as any. Records below the newest that closed a manifest
are deleted now and then: what remains begins with a valid one.
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

from spark_bridge.sink_source import BatchSource, decode_values
from spark_bridge.sink_wire import BatchSender
from tailrace.admin import Admin
from tailrace.errors import RecordTooLargeError, TopicExistsError, UnknownTopicError
from tailrace.formats.arrow_batch import default_rows, encode
from tailrace.new_topic import NewTopic
from tailrace.protocol.wire import Api
from tailrace.records import TopicPartition
from tailrace.topics import TopicInfo

logger = logging.getLogger("tailrace.spark")
UNKNOWN_ROWS = -1
FENCED_MAX = 100
"""So many runs that others have taken over from are remembered."""
EPOCH_MAX = 32_767
KEEP_RECORDS = 48
"""With more records than that below the newest that closed a manifest, they are deleted."""
MADE_TIMEOUT_S = 30.0
MADE_LOOK_S = 0.01
LOG_CONFIGS = {"retention.ms": -1, "durability": "disk", "segment.bytes": 8 << 20}


@dataclass(frozen=True, slots=True)
class Target:
    """A partition that a batch is published to."""

    topic: str
    topic_id: str
    """Hexadecimal."""
    partition: int
    map_version: int
    """Of the slot map by which rows were routed; 0: by none."""
    start: int
    """The log's end before the publication began: nothing of it lies below."""
    rows: int
    skip: int = 0
    """So many rows were published under an earlier epoch; sequence 0 is the row behind them."""
    identity: tuple[int, int] | None = None
    """Producer and epoch of the rows behind `skip`, where the partition had forgotten the manifest's; those of all others stay what they are."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Which partition it is, of which topic."""
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
    """What the publication of one batch is: everything that its repetition needs. The order of its batches is that of `stages`."""

    batch_id: int
    producer_id: int
    epoch: int
    targets: tuple[Target, ...]
    stages: tuple[Stage, ...]

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Manifest:
        """What `to_json` made."""
        stages = tuple(Stage(s["topic"], s["topic_id"], s["partition"], _together(s["batches"])) for s in given["stages"])
        targets = tuple(Target(**{**t, "identity": tuple(t["identity"]) if t.get("identity") else None}) for t in given["targets"])
        return cls(given["batch_id"], given["producer_id"], given["epoch"], targets, stages)

    def to_json(self) -> dict[str, Any]:
        """For a record: the batches by column, offsets as gaps, which are a third of the bytes when they are compressed."""
        stages = [{**asdict(stage), "batches": _apart(stage.batches)} for stage in self.stages]
        return {**asdict(self), "stages": stages}

    def identity_in(self, number: int) -> tuple[int, int]:
        """Producer and epoch of what is sent to this target."""
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
    """What the log says so far."""

    at: int = -1
    """The offset of the newest valid record; -1: there is none."""
    run: str = ""
    fenced: tuple[str, ...] = ()
    """Runs of the query that a later one has taken over from."""
    published: int = -1
    """The newest batch that is published."""
    rows: int = UNKNOWN_ROWS
    """Of that batch."""
    producer_id: int = -1
    epoch: int = -1
    manifest: Manifest | None = None
    """The one that is decided, and not known to be published."""


def follow(state: State, offset: int, record: dict[str, Any]) -> State:
    """The state behind one more record; the same where that is not valid."""
    if record["on"] != state.at:
        return state
    manifest = Manifest.from_json(record["manifest"]) if record["kind"] == "begin" else None
    if record["kind"] == "claim":
        manifest = state.manifest
    rows = record.get("rows", UNKNOWN_ROWS)
    return State(offset, record["run"], tuple(record["fenced"]), record["published"], rows, record["producer"], record["epoch"], manifest)


def taken_over(state: State, run: str) -> State:
    """The state with this run as its owner."""
    if run == state.run:
        return state
    fenced = (*state.fenced, state.run)[-FENCED_MAX:] if state.run else state.fenced
    return replace(state, run=run, fenced=fenced)


class DecisionLog(Protocol):
    """Where decisions are kept."""

    is_of_query: bool
    """Its batches are a stream's, which come one after the other."""

    def read(self) -> State:
        """What is decided now."""
        ...

    def append(self, seen: State, kind: str, following: State) -> bool:
        """Decide, if nothing was decided since `seen`; False: something was."""
        ...

    def trim(self) -> None:
        """Delete what nobody needs any more."""
        ...


class MemoryLog:
    """Of a batch write, which nobody could take up again: its job has no name."""

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
        """There is nothing."""


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
        with self._said():
            return self._read()

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Errors that only concern the log, in words that say what it is."""
        try:
            yield
        except UnknownTopicError:
            raise UnknownTopicError(
                f"{self._info.name!r}, the log of what this query has published, was deleted while a batch was committed: whether that batch is in its topic "
                "only the topic can tell. Look there before the query is started again, which writes the batch once more"
            ) from None
        except RecordTooLargeError:
            raise RecordTooLargeError(
                "the batch is in too many pieces for a record of the sink's log: each task has one for each partition that it writes to. Give it fewer tasks "
                "(coalesce before writing, or a lower spark.sql.shuffle.partitions), or smaller batches (maxOffsetsPerTrigger)"
            ) from None

    def _read(self) -> State:
        found = self._admin.offsets({TopicPartition(self._info.name, 0): "latest"})[TopicPartition(self._info.name, 0)]
        if self._position < 0:
            self._position = self._first = found["beginning"]
        if self._position < found["end"]:
            for offset, value in decode_values(self._source, self._info, self._position, found["end"]):
                if (record := self._decoded(offset, value)) is not None:
                    self._take(offset, record)
            self._position = found["end"]
        return self._state

    def _decoded(self, offset: int, value: bytes | None) -> dict[str, Any] | None:
        """The record; None for what nobody of the sink has written: all readers pass over it alike."""
        try:
            record = json.loads(zlib.decompress(value or b""))
            return record if record["on"] < offset else None
        except (zlib.error, ValueError, TypeError, KeyError) as error:
            logger.warning("sink_log_stranger topic=%s offset=%d reason=%r", self._info.name, offset, error)
            return None

    def _take(self, offset: int, record: dict[str, Any]) -> None:
        if self._state.at < 0 and offset == self._first and record["on"] < offset:
            record["on"] = -1  # what came before is deleted: the first is a valid one
        before, self._state = self._state, follow(self._state, offset, record)
        if self._state is not before and record["kind"] in ("done", "void"):
            self._closed_at = offset

    def append(self, seen: State, kind: str, following: State) -> bool:
        """See `DecisionLog`. Raises TailraceError; RecordTooLargeError for a manifest that no record holds."""
        with self._said():
            return self._append(seen, kind, following)

    def _append(self, seen: State, kind: str, following: State) -> bool:
        record = {
            "on": seen.at, "kind": kind, "run": following.run, "fenced": following.fenced, "published": following.published,
            "rows": following.rows, "producer": following.producer_id, "epoch": following.epoch,
            "manifest": None if following.manifest is None or kind != "begin" else following.manifest.to_json(),
        }  # fmt: skip
        rows = default_rows([0], [None], [zlib.compress(json.dumps(record, separators=(",", ":")).encode())], None)
        data = encode(
            rows, schema_id=self._info.schema_id, seed=self._info.seeds[0], compression="none", first_timestamp_us=0, max_timestamp_us=0
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
    """The topic, made if it is not there. Raises TailraceError."""
    deadline = time.monotonic() + MADE_TIMEOUT_S
    while topic.name not in (found := known(admin, [topic.name])):
        try:
            admin.create_topics(topic)
        except TopicExistsError:  # another task is making it, which takes the appliance some milliseconds
            if time.monotonic() > deadline:
                raise
            time.sleep(MADE_LOOK_S)
    return found[topic.name]


def known(admin: Admin, names: Sequence[str]) -> dict[str, TopicInfo]:
    """What is there of these topics. Raises TailraceError."""
    answer = admin._call(Api.METADATA, {"topics": list(names)})
    return {described["name"]: TopicInfo(described) for described in answer["topics"] if "topic_id" in described}
