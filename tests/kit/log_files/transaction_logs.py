"""A partition's files with transactions, written as worker and flusher write them, and a model of
what a reader of each isolation level is to see.

Owner: one test.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from shm.memory.layout import SlotState
from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import PartitionState
from tailrace.batch import arrow_codec
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_TRANSACTIONAL,
    CONTROL_ABORT,
    CONTROL_COMMIT,
    END_OF_STREAM,
    TRANSACTIONAL_PRODUCER_IDS,
    BatchHeader,
    checksum_seed,
    header_position,
    verify_batch,
)
from tailrace.format.record_batch.header_stamps import insert_header, stamp_appended
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tailrace.format.segments import segment_index, transaction_index
from tailrace.format.segments.segment import INDEX_SUFFIX, file_name
from tailrace.format.segments.segment_index import IndexEntry
from tailrace.format.segments.transaction_index import TRANSACTION_INDEX_SUFFIX, AbortedTransaction
from tailrace.kernel.reference_arrow import default_rows
from tests.kit.batches import TIME_US, TOPIC_ID

FIRST_ID = TRANSACTIONAL_PRODUCER_IDS


@dataclass
class Open:
    """An open transaction."""

    first_offset: int
    segments: set[int] = field(default_factory=set)
    rows: list[int] = field(default_factory=list)


def _empty_message() -> bytes:
    batch = pa.RecordBatch.from_arrays(
        [pa.array([], f.type) for f in DEFAULT_SCHEMA], schema=DEFAULT_SCHEMA
    )
    return bytes(batch.serialize())


_EMPTY = _empty_message()


class TransactionLog:
    """One partition. `state` is what its flusher has published last."""

    def __init__(
        self, data_dir: Path, *, topic: str = "t", topic_id: bytes = TOPIC_ID, partition: int = 0
    ) -> None:
        self.topic, self.topic_id, self.partition = topic, topic_id, partition
        self.seed = checksum_seed(topic_id, partition)
        self.directory = data_dir / f"{topic}-{partition}"
        self.directory.mkdir(parents=True)
        self.state = PartitionState.empty(topic_id, partition, SlotState.ONLINE, 1)
        self.open: dict[tuple[int, int], Open] = {}
        self.decided: list[tuple[int, bytes]] = []
        """(offset, value) of each committed record, in no order."""
        self.all: list[tuple[int, bytes]] = []
        """(offset, value) of each record."""
        self.pending: dict[int, bytes] = {}
        self.ends: list[int] = [0]
        """Offsets where batches begin or end."""
        self.aborted_rows: set[int] = set()
        self.bases: list[int] = []
        self._position = 0
        self._largest = 0
        self.aborted_version = 0
        self.schema = to_message(DEFAULT_SCHEMA)
        known = PartitionMetadata(topic, partition, topic_id, {1: self.schema})
        (self.directory / PARTITION_FILE).write_bytes(known.encode())

    # ---- files -----------------------------------------------------------------------------------

    def path(self, base: int, suffix: str = "") -> Path:
        """A file of a segment: the segment itself, or what has this suffix."""
        return self.directory / (file_name(base, suffix) if suffix else file_name(base))

    def roll(self) -> None:
        """Seal the segment and begin the next."""
        base = self.state.log_end_offset
        if self.bases and self.bases[-1] == base:
            return
        if self.bases:
            with open(self.path(self.bases[-1]), "ab") as file:
                file.write(END_OF_STREAM)
        self.bases.append(base)
        self.path(base).write_bytes(self.schema)
        self.path(base, INDEX_SUFFIX).write_bytes(segment_index.encode_header(base))
        self._position, self._largest = len(self.schema), 0
        self.state = self.state._replace(active_segment_base=base, segment_count=len(self.bases))

    def _put(self, batch: bytearray, *, is_transactional: bool) -> int:
        if not self.bases:
            self.roll()
        base = self.bases[-1]
        offset = self.state.log_end_offset
        with memoryview(batch) as view:
            header = verify_batch(view, self.seed)
            stamp_appended(
                view, header_position(view), header, base_offset=offset, append_time_us=TIME_US,
                leader_epoch=0, durable_offset=0, seed=self.seed,
            )  # fmt: skip
        self._largest = max(self._largest, header.max_timestamp_us)
        index = self.path(base, TRANSACTION_INDEX_SUFFIX)
        if is_transactional and not index.exists():
            index.write_bytes(transaction_index.encode_header(base))
        with open(self.path(base, INDEX_SUFFIX), "ab") as file:
            entry = IndexEntry(offset, self._position, self._largest, len(batch))
            file.write(segment_index.encode_entries([entry]))
        with open(self.path(base), "ab") as file:
            file.write(batch)
        self._position += len(batch)
        following = offset + header.last_offset_delta + 1
        self.ends.append(following)
        self.state = self.state._replace(log_end_offset=following)
        return offset

    def append(
        self,
        count: int = 3,
        producer: tuple[int, int] | None = None,
        *,
        value_bytes: int = 0,
        compression: str = "none",
        publish: bool = True,
    ) -> int:
        """A batch, of a transaction if it has a producer (its number, its epoch). Returns its first
        offset.
        """
        first = self.state.log_end_offset
        values: list[bytes | None] = [
            b"value-%d-" % (first + n) + b"x" * value_bytes for n in range(count)
        ]
        times = [TIME_US + 1000 * (first + n) for n in range(count)]
        rows = default_rows(times, [None] * count, values, None)
        header = BatchHeader(
            attributes=0 if producer is None else ATTRIBUTE_TRANSACTIONAL,
            record_count=count, last_offset_delta=count - 1,
            first_timestamp_us=times[0], max_timestamp_us=times[-1], schema_id=1,
            producer_id=-1 if producer is None else FIRST_ID + producer[0],
            producer_epoch=-1 if producer is None else producer[1],
            base_sequence=-1 if producer is None else 0,
        )  # fmt: skip
        batch = arrow_codec.encode_as(rows, header, self.seed, compression)
        offset = self._put(batch, is_transactional=producer is not None)
        records = [(offset + n, value) for n, value in enumerate(values) if value is not None]
        self.all += records
        if producer is None:
            self.decided += records
        else:
            one = self.open.setdefault(producer, Open(offset))
            one.segments.add(self.bases[-1])
            one.rows += [number for number, _ in records]
            self.pending.update(records)
        if publish:
            self.publish()
        return offset

    def end(self, producer: tuple[int, int], *, commit: bool, publish: bool = True) -> int:
        """The marker that ends a transaction. Returns its offset."""
        header = BatchHeader(
            attributes=ATTRIBUTE_TRANSACTIONAL | ATTRIBUTE_CONTROL,
            first_timestamp_us=TIME_US, max_timestamp_us=TIME_US, schema_id=1,
            producer_id=FIRST_ID + producer[0], producer_epoch=producer[1], base_sequence=-1,
            control_type=CONTROL_COMMIT if commit else CONTROL_ABORT,
        )  # fmt: skip
        offset = self._put(insert_header(_EMPTY, header, self.seed), is_transactional=True)
        one = self.open.pop(producer)
        for base in () if commit else one.segments:
            entry = AbortedTransaction(
                FIRST_ID + producer[0], producer[1], one.first_offset, offset
            )
            with open(self.path(base, TRANSACTION_INDEX_SUFFIX), "ab") as file:
                file.write(transaction_index.encode_entry(entry))
        self.aborted_version += not commit
        for number in one.rows:
            value = self.pending.pop(number)
            if commit:
                self.decided.append((number, value))
            else:
                self.aborted_rows.add(number)
        if publish:
            self.publish()
        return offset

    def publish(self) -> None:
        """Publish the state, as a flusher does once everything is durable."""
        end = self.state.log_end_offset
        stable = min([one.first_offset for one in self.open.values()] + [end])
        self.state = self.state._replace(
            high_watermark=end, last_stable_offset=stable, aborted_version=self.aborted_version,
            active_valid_end=self._position,
        )  # fmt: skip

    # ---- model -----------------------------------------------------------------------------------

    def committed(self, start: int = 0) -> list[tuple[int, bytes]]:
        """Records that a reader of committed records is to see from `start` on."""
        end = self.state.last_stable_offset
        return sorted(record for record in self.decided if start <= record[0] < end)

    def uncommitted(self, start: int = 0) -> list[tuple[int, bytes]]:
        """Records that a reader of all records is to see from `start` on."""
        end = self.state.high_watermark
        return [record for record in self.all if start <= record[0] < end]

    def damage(self, base: int, suffix: str, position: int) -> None:
        """Flip a bit of a file."""
        data = bytearray(self.path(base, suffix).read_bytes())
        data[position] ^= 1
        self.path(base, suffix).write_bytes(data)

    def remove(self, base: int, suffix: str) -> None:
        """Remove a file of a segment."""
        os.unlink(self.path(base, suffix))

    # ---- as a front sees it ----------------------------------------------------------------------

    def read(self, _slot: int) -> PartitionState:
        """As `PartitionTable.read`."""
        return self.state

    def route(self, slot: int = 0) -> Assignment:
        """Its assignment."""
        return Assignment(
            self.topic, self.topic_id, self.partition, 1, slot, 1, 0, 0, 0, 1, self.schema, False
        )


def grow(rng: random.Random, log: TransactionLog) -> None:
    """Something happens to the log."""
    what = rng.random()
    if what < 0.12:
        log.roll()
    elif what < 0.3:
        log.append(rng.randrange(1, 5), value_bytes=rng.choice((0, 0, 300)))
    elif what < 0.75:
        open_ones = list(log.open)
        if open_ones and rng.random() < 0.6:
            producer = rng.choice(open_ones)
        else:
            producer = rng.randrange(4), len(log.all) + rng.randrange(3)
            if any(each[0] == producer[0] for each in open_ones):
                return
        log.append(rng.randrange(1, 5), producer, value_bytes=rng.choice((0, 0, 2_000)))
    elif log.open:
        log.end(rng.choice(list(log.open)), commit=rng.random() < 0.5)
