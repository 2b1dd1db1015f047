"""Writes the rows of one attempt of a task, once, into the target topics, as a branch of the
batch's transaction.

Owner: one attempt of a task.
Invariants:
- `finish` returns when all rows are acknowledged, and are in the topics that the task began with.
- Rows for one partition keep their order.
- Without rows the appliance is not asked. A batch that was committed before is not written.
Crash: a branch that no commit names is aborted, with the next decision or by the transaction's
timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from spark_bridge.sink import rows as sink_rows
from spark_bridge.sink.commit import older
from spark_bridge.sink.connections import give_back, take
from spark_bridge.sink.messages import Mark, WrittenTask
from spark_bridge.sink.options import CLIENT_ID, SinkOptions
from spark_bridge.sink.transaction import TransactionClient, aborted, fenced
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_json_now
from tailrace.client.topics.topic_metadata import TopicInfo, is_internal, topics_from_metadata
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    ProducerFencedError,
    RecordTooLargeError,
    TransactionAbortedError,
    UnknownTopicError,
    error_for,
)
from tailrace.producer.frame_appender import RowSlots
from tailrace.producer.futures import FrameFuture
from tailrace.producer.producer import Producer
from tailrace.producer.routed_frames import send_routed, topics_written
from tailrace.protocol.frame import Api

PIECE_BYTES = 960 << 10
"""Bytes of rows that are collected for a partition: a batch of a MiB has the least cost per row."""
BUFFERED_MAX_BYTES = 48 << 20
"""Bytes of Spark's batches of which some rows are not sent. Smaller pieces are sent before there is
more, as with many partitions, or some that get few rows.
"""
BUFFER_BYTES = 64 << 20
_runs: dict[tuple[str, str], str] = {}
"""(appliance, transactional id) -> the run that this process has joined: it need not look at the
mark before it joins again.
"""


@dataclass(slots=True)
class _Buffered:
    """Rows that wait for a batch of one partition."""

    info: TopicInfo
    partition: int
    parts: list[sink_rows.Part] = field(default_factory=list)
    byte_count: float = 0


@contextmanager
def _explained() -> Iterator[None]:
    """Turn errors of the branch into those of the sink."""
    try:
        yield
    except ProducerFencedError as error:
        raise fenced(error) from error
    except TransactionAbortedError as error:
        raise aborted(error) from error


class TaskWriter:
    """See the module's docstring."""

    def __init__(
        self, options: SinkOptions, identity: str, run: str, task: int, batch_id: int | None
    ) -> None:
        """`identity`: the sink's; `task`: the number of the Spark partition; `batch_id`: None where
        Spark does not say it to tasks.
        """
        self._options = options
        self._identity = identity
        self._batch_id = batch_id
        self._connection: Connection | None = take(options.bootstrap)
        self._producer: Producer | None = None
        self._is_done = False
        """True if the batch was committed before."""
        self._checked: pa.Schema | None = None
        """Columns of the last batch, which fit."""
        self._infos: dict[str, TopicInfo] = {}
        self._buffered: dict[tuple[str, int], _Buffered] = {}
        self._buffered_bytes = 0
        self._sticky = task
        """Counter of the batches of rows without a key."""
        self._sent: list[tuple[str, FrameFuture]] = []
        self._written = WrittenTask(identity, run)

    def close(self) -> None:
        """Release everything. A branch that is not finished can never be committed."""
        if self._producer is not None:
            self._producer.close(timeout=0)
        if self._connection is not None:
            self._connection.close()

    # ---- the transaction -------------------------------------------------------------------------

    def _join(self) -> None:
        """Join the batch's transaction, unless the batch was committed before. Raises
        TailraceError.
        """
        written, options = self._written, self._options
        assert self._connection is not None
        client = TransactionClient(self._connection, self._identity, options.publish_timeout_ms)
        key, is_job = (
            (options.bootstrap, client.transactional_id),
            self._identity.startswith("job:"),
        )
        if not is_job and _runs.get(key) != written.run:
            written.mark = client.mark()
            if self._find_done(written.mark):
                return
        written.transaction, written.mark = client.join(written.run, options.transaction_timeout_ms)
        if not is_job:
            _runs[key] = written.run
        if self._find_done(written.mark):
            return
        self._producer = Producer(
            options.bootstrap, client_id=CLIENT_ID, acks="all", linger_ms=0,
            buffer_memory=BUFFER_BYTES, max_block_ms=options.publish_timeout_ms,
            delivery_timeout_ms=options.publish_timeout_ms,
            transaction_branch=written.transaction.branch(),
        )  # fmt: skip

    def _find_done(self, mark: Mark | None) -> bool:
        """True if the batch was committed before. Raises InvalidRequestError for a stream's batch
        before the last.
        """
        batch_id = self._batch_id
        if mark is None or batch_id is None or batch_id > mark.batch_id:
            return False
        if self._identity.startswith("query:") and batch_id < mark.batch_id:
            raise InvalidRequestError(older(batch_id, mark.batch_id))
        self._is_done, self._written.transaction = True, None
        return True

    # ---- rows ------------------------------------------------------------------------------------

    def _info(self, topic: str) -> TopicInfo:
        info = self._infos.get(topic)
        if info is None:
            if is_internal(topic):
                raise InvalidRequestError(
                    f"topic {topic!r} is internal and cannot be written to; name another"
                )
            info = self._load(topic)
            if info.slot_map_version and info.owners is None:
                raise error_for(
                    ErrorCode.NOT_READY, f"the slot map of topic {topic!r} is being changed"
                )
            self._infos[topic] = info
        return info

    def _load(self, topic: str) -> TopicInfo:
        assert self._connection is not None
        request, timeout_ms = {"topics": [topic]}, self._options.publish_timeout_ms
        try:
            answer = call_json_now(self._connection, Api.METADATA, request, timeout_ms)
            return topics_from_metadata(answer, topic)[topic]
        except UnknownTopicError:
            raise UnknownTopicError(f"there is no topic {topic!r} to write to") from None

    def add(self, batch: pa.RecordBatch) -> None:
        """Some rows. Raises TailraceError; SchemaMismatchError and InvalidRecordError name the
        column.
        """
        topic = self._options.topic
        if not batch.num_rows:
            return
        if not self._written.row_count:
            self._join()
        self._written.row_count += batch.num_rows
        if self._is_done:
            return
        with _explained():
            self._add(topic, batch)

    def _add(self, topic: str | None, batch: pa.RecordBatch) -> None:
        if self._checked is None or not batch.schema.equals(self._checked):
            sink_rows.check_columns(
                batch.schema, None if topic is None else self._info(topic), self._options.key_column
            )
            self._checked = batch.schema
        for name, rows in [(topic, batch)] if topic is not None else sink_rows.by_topic(batch):
            info = self._info(name)
            if topic is None:
                sink_rows.check_columns(rows.schema, info, None)
            self._add_rows(info, rows)

    def _add_rows(self, info: TopicInfo, batch: pa.RecordBatch) -> None:
        rows = sink_rows.typed_rows(batch, info) if info.typed else sink_rows.default_rows(batch)
        for number, part in sink_rows.routed_parts(rows, batch, info, self._options.key_column):
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
            buffered = self._buffered[info.name, partition] = _Buffered(info, partition)
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
        assert self._producer is not None
        info, parts = buffered.info, buffered.parts
        slots = sink_rows.slots_of(parts)
        sent = send_routed(
            self._producer, info, sink_rows.joined(parts), buffered.partition,
            None if slots is None else RowSlots(slots, info.slot_map_version),
        )  # fmt: skip
        self._sent.append((info.name, sent))
        buffered.parts, buffered.byte_count = [], 0

    def _send_all(self) -> None:
        for buffered in self._buffered.values():
            if buffered.parts:
                self._send(buffered)
        self._buffered_bytes = 0

    # ---- the end ---------------------------------------------------------------------------------

    def finish(self) -> WrittenTask:
        """Send the rest and wait until all is acknowledged. Raises TailraceError."""
        if self._producer is not None:
            with _explained():
                self._send_all()
                for topic, sent in self._sent:
                    try:
                        sent.result()
                    except RecordTooLargeError as error:
                        raise RecordTooLargeError(f"topic {topic!r}: {error.detail}") from error
                self._written.branch = self._producer.finish_branch()
            self._check_topics()
        if self._connection is not None:
            give_back(self._options.bootstrap, self._connection)
            self._connection = None
        return self._written

    def _check_topics(self) -> None:
        """Raise UnknownTopicError if a topic was made again: what it had was lost with it."""
        assert self._producer is not None
        known = {info.topic_id for info in self._infos.values()}
        for written in topics_written(self._producer):
            if written.topic_id not in known:
                raise UnknownTopicError(
                    f"topic {written.name!r} was deleted and created again while a task wrote to "
                    "it; nothing of the batch is written. Start the query again"
                )
