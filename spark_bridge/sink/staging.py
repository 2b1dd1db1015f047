"""Staging of a task's rows in internal topics of the appliance: encoded, partitioned for their
targets, and addressed by offset.

The names of staging topics begin with INTERNAL_PREFIX, and lists of topics leave them out. There is
one for each query and kind of batch (schema, limit, compression), of STAGES partitions. A task
writes to one partition, so that its batches lie together.

Owner: one task.
Invariants:
- `finish` returns when all rows are durable.
- The ranges that it returns hold exactly the task's rows, without those of its failed attempts and
  of other tasks.
- Batches for one target lie in the order of its rows.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, field

import pyarrow as pa

from spark_bridge.sink import rows as sink_rows
from spark_bridge.sink.decision_log import known, made
from spark_bridge.sink.options import PUBLISH_TIMEOUT_MS, SinkOptions
from spark_bridge.sink.staged_batches import CLIENT_ID
from tailrace.admin.admin import Admin
from tailrace.client.new_topic import NewTopic
from tailrace.client.topic_metadata import INTERNAL_PREFIX, TopicInfo, is_internal
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError, UnknownTopicError, error_for
from tailrace.producer.futures import FrameFuture
from tailrace.producer.producer import Producer

STAGES = 4
PIECE_BYTES = 960 << 10
"""Bytes of rows that are collected for a partition: a batch of a MiB has the least cost per row."""
BUFFERED_MAX_BYTES = 48 << 20
"""Bytes of Spark's batches of which some rows are not sent. Smaller pieces are sent before there is
more, as with many partitions, or some that get few rows.
"""
RETENTION_MS = 7 * 86_400_000
"""Retention of staged rows: a publication that takes longer loses its rows."""
BUFFER_BYTES = 64 << 20
CONNECT_TIMEOUT_MS = 10_000
"""Time to connect in the driver, before a task starts. Tasks wait for publishTimeoutMs, for the
appliance may be restarting.
"""


def log_topic(identity: str) -> str:
    """The topic with the decisions of a sink."""
    return f"{INTERNAL_PREFIX}sink_{_short(identity)}"


def stage_prefix(identity: str) -> str:
    """Prefix of the names of a sink's staging topics."""
    return f"{INTERNAL_PREFIX}stage_{_short(identity)}_"


def _short(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def stage_topic(identity: str, info: TopicInfo) -> NewTopic:
    """The staging topic for batches of a topic, which accepts the same batches."""
    kept = {name: info.settings[name] for name in ("max.message.bytes", "compression.type")}
    kind = zlib.crc32(repr((info.schema_message, sorted(kept.items()))).encode())
    configs = {
        **kept,
        "durability": "disk",
        "retention.ms": RETENTION_MS,
        "segment.bytes": 64 << 20,
    }
    return NewTopic(
        f"{stage_prefix(identity)}{kind:08x}", STAGES, configs, info.schema if info.typed else None
    )


@dataclass(slots=True)
class Staged:
    """Result of a task; picklable."""

    targets: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(topic, its id, partition, version of the slot map)."""
    batches: dict[tuple[str, str, int], list[tuple[int, int, int]]] = field(default_factory=dict)
    """(staging topic, its id, partition) -> (first offset, rows, index of the target)."""
    rows: int = 0


@dataclass(slots=True)
class _Buffered:
    info: TopicInfo
    stage: TopicInfo
    target: int
    parts: list[sink_rows.Part] = field(default_factory=list)
    byte_count: float = 0


class Stager:
    """See the module's docstring."""

    def __init__(self, options: SinkOptions, identity: str, task: int) -> None:
        """`identity`: the sink's; `task`: the number of the Spark partition."""
        self._options = options
        self._identity = identity
        self._task = task
        self._admin = Admin(
            options.bootstrap, client_id=CLIENT_ID, connect_timeout_ms=options.publish_timeout_ms
        )
        self._producer: Producer | None = None
        self._infos: dict[str, TopicInfo] = {}
        self._stages: dict[str, TopicInfo] = {}
        self._buffered: dict[tuple[str, int], _Buffered] = {}
        self._buffered_bytes = 0
        self._sticky = task
        """Counter of the batches of rows without a key."""
        self._sent: list[tuple[TopicInfo, int, FrameFuture]] = []
        self.staged = Staged()

    def close(self) -> None:
        """Release everything. Rows that are staged and not named in a commit are never
        published.
        """
        if self._producer is not None:
            self._producer.close(timeout=0)
        self._admin.close()

    def _info(self, topic: str) -> TopicInfo:
        info = self._infos.get(topic)
        if info is None:
            if is_internal(topic):
                raise InvalidRequestError(
                    f"topic {topic!r} is internal and cannot be written to; name another"
                )
            found = known(self._admin, [topic])
            if topic not in found:
                raise UnknownTopicError(f"there is no topic {topic!r} to write to")
            info = found[topic]
            if info.slot_map_version and info.owners is None:
                raise error_for(
                    ErrorCode.NOT_READY, f"the slot map of topic {topic!r} is being changed"
                )
            self._infos[topic] = info
            self._stages[topic] = made(self._admin, stage_topic(self._identity, info))
        return info

    def add(self, batch: pa.RecordBatch) -> None:
        """Some rows. Raises TailraceError; SchemaMismatchError and InvalidRecordError name the
        column.
        """
        topic = self._options.topic
        if not batch.num_rows:
            return
        sink_rows.check_columns(
            batch.schema, None if topic is None else self._info(topic), self._options.key_column
        )
        for name, rows in [(topic, batch)] if topic is not None else sink_rows.by_topic(batch):
            info = self._info(name)
            if topic is None:
                sink_rows.check_columns(rows.schema, info, None)
            self._add_rows(info, rows)

    def _add_rows(self, info: TopicInfo, batch: pa.RecordBatch) -> None:
        rows = sink_rows.typed_rows(batch, info) if info.typed else sink_rows.default_rows(batch)
        numbers = sink_rows.partitions_of(rows, batch, info, self._options.key_column)
        self.staged.rows += rows.num_rows
        for number, part in sink_rows.split(rows, numbers):
            is_keyless = number == sink_rows.NO_KEY
            chosen = self._sticky % len(info.partitions) if is_keyless else number
            if self._buffer(self._of(info, chosen), part) and is_keyless:
                self._sticky += 1
        self._buffered_bytes += rows.nbytes
        if self._buffered_bytes > BUFFERED_MAX_BYTES:
            self._send_all()

    def _of(self, info: TopicInfo, partition: int) -> _Buffered:
        buffered = self._buffered.get((info.name, partition))
        if buffered is None:
            target = (info.name, info.topic_id.hex(), partition, info.slot_map_version)
            self.staged.targets.append(target)
            buffered = _Buffered(info, self._stages[info.name], len(self.staged.targets) - 1)
            self._buffered[info.name, partition] = buffered
        return buffered

    def _buffer(self, buffered: _Buffered, part: sink_rows.Part) -> bool:
        """Buffer rows of a part; True if a batch was sent."""
        has_sent = False
        while buffered.byte_count + part.row_count * part.row_bytes > PIECE_BYTES:
            room = int((PIECE_BYTES - buffered.byte_count) / part.row_bytes)
            if not room and not buffered.parts:
                room = 1  # a row that is larger than a piece
            if room >= part.row_count:
                break
            if room:
                first, part = part.cut(room)
                buffered.parts.append(first)
            self._send(buffered)
            has_sent = True
        buffered.parts.append(part)
        buffered.byte_count += part.row_count * part.row_bytes
        return has_sent

    def _send(self, buffered: _Buffered) -> None:
        if self._producer is None:
            self._producer = Producer(
                self._options.bootstrap, client_id=CLIENT_ID, acks="all", linger_ms=0,
                buffer_memory=BUFFER_BYTES,
                delivery_timeout_ms=max(PUBLISH_TIMEOUT_MS, self._options.publish_timeout_ms),
            )  # fmt: skip
        rows = sink_rows.joined(buffered.parts)
        buffered.parts, buffered.byte_count = [], 0
        handle = self._producer.send_arrow(buffered.stage.name, rows, partition=self._task % STAGES)
        self._sent.append((buffered.stage, buffered.target, handle))

    def _send_all(self) -> None:
        for buffered in self._buffered.values():
            if buffered.parts:
                self._send(buffered)
        self._buffered_bytes = 0

    def finish(self) -> Staged:
        """Send the rest and wait until all is durable. Raises TailraceError."""
        self._send_all()
        for stage, target, handle in self._sent:
            for batch in handle.result():
                assert batch.base_offset is not None
                key = (stage.name, stage.topic_id.hex(), batch.partition)
                self.staged.batches.setdefault(key, []).append(
                    (batch.base_offset, batch.record_count, target)
                )
        return self.staged


def combined(
    staged: list[Staged],
) -> tuple[list[tuple[str, str, int, int]], dict[tuple[str, str, int], list[tuple[int, int, int]]]]:
    """Combine the tasks' results: the targets, and by partition of a staging topic its batches in
    order, with numbers of those targets.
    """
    targets: dict[tuple[str, str, int, int], int] = {}
    stages: dict[tuple[str, str, int], list[tuple[int, int, int]]] = {}
    for each in staged:
        for key, batches in each.batches.items():
            stages.setdefault(key, []).extend(
                (first, rows, targets.setdefault(each.targets[target], len(targets)))
                for first, rows, target in batches
            )
    for batches in stages.values():
        batches.sort()
    return list(targets), dict(sorted(stages.items()))
