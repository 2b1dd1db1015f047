"""Batches and markers of transactions, as a worker puts them into its ring, and what the headers in
segment files say of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from shm.memory.layout import ACKS_ALL, FLAG_BYTES, FLAG_TRANSACTIONAL, SOURCE_GROUPS
from shm.memory.region import Region
from shm.queues.ring import RingWriter
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_TRANSACTIONAL,
    CONTROL_ABORT,
    TRANSACTIONAL_PRODUCER_IDS,
    BatchHeader,
    read_header,
)
from tailrace.format.record_batch.header_stamps import insert_header, stamp_producer
from tailrace.format.segments.segment import (
    Walk,
    schema_message_length,
    segment_bases,
    walk_batches,
)
from tailrace.format.segments.transaction_index import (
    TRANSACTION_INDEX_SUFFIX,
    AbortedBatches,
    decode_transaction_index,
)
from tests.kit.batches import SEED, TIME_US, make_batch, rows, stamped
from workers.segment.files import Files, read_whole
from workers.segment.segment_reader import SegmentReader


def producer(number: int) -> int:
    """A transactional producer id."""
    return TRANSACTIONAL_PRODUCER_IDS + number


def make_marker(producer_id: int, epoch: int, control_type: int) -> bytearray:
    """A marker as a worker makes it, before its offset."""
    header = BatchHeader(
        attributes=ATTRIBUTE_TRANSACTIONAL | ATTRIBUTE_CONTROL, record_count=0,
        last_offset_delta=0, first_timestamp_us=TIME_US, max_timestamp_us=TIME_US,
        producer_id=producer_id, producer_epoch=epoch, control_type=control_type, schema_id=1,
    )  # fmt: skip
    return insert_header(rows(0).serialize(), header, SEED)


class RingFiller:
    """Stands for a worker: puts batches into a ring, with dense offsets from `next_offset` on."""

    def __init__(self, region: Region, next_offset: int = 0, leader_epoch: int = 0) -> None:
        self.ring = RingWriter(region)
        self.next_offset = next_offset
        self.leader_epoch = leader_epoch
        self._sequences: dict[tuple[int, int], int] = {}

    def data(self, count: int, producer_id: int = -1, epoch: int = 0) -> int:
        """Append a batch. Returns its base offset."""
        sequence = self._sequences.get((producer_id, epoch), 0)
        self._sequences[producer_id, epoch] = sequence + count
        made = make_batch(count, producer_id=producer_id, epoch=epoch, sequence=sequence)
        return self._append(made)

    def batch(self, made: bytearray, count: int, producer_id: int = -1, epoch: int = 0) -> int:
        """Append a batch of `count` records that a test has encoded. Returns its base offset."""
        if producer_id >= 0:
            sequence = self._sequences.get((producer_id, epoch), 0)
            self._sequences[producer_id, epoch] = sequence + count
            with memoryview(made) as view:
                stamp_producer(
                    view, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence,
                    seed=SEED,
                )  # fmt: skip
        return self._append(made)

    def marker(self, producer_id: int, epoch: int, control_type: int) -> int:
        """Append a marker. Returns its offset."""
        return self._append(make_marker(producer_id, epoch, control_type))

    def _append(self, batch: bytearray) -> int:
        base_offset = self.next_offset
        data = stamped(batch, base_offset, leader_epoch=self.leader_epoch)
        header = read_header(data)
        self.ring.reclaim([])
        position = self.ring.try_claim(len(data))
        assert position is not None, "step the flusher first"
        index = position % self.ring.ring_bytes
        self.ring.data[index : index + len(data)] = data
        flags = FLAG_BYTES | ACKS_ALL | (FLAG_TRANSACTIONAL if header.is_transactional else 0)
        self.ring.write(
            position, len(data), 0, base_offset, header.next_offset, 0, 0, 0, flags,
            SOURCE_GROUPS, 0, header.producer_id, header.base_sequence, header.producer_epoch,
            header.last_offset_delta, self.leader_epoch, header.append_time_us,
            header.max_timestamp_us,
            control_type=header.control_type,
        )  # fmt: skip
        self.ring.commit()
        self.next_offset = header.next_offset
        return base_offset


def headers_in(files: Files, directory: str) -> Iterator[tuple[int, BatchHeader]]:
    """(segment base, header) of every batch of a partition, each once."""
    bases = segment_bases(files.list(directory))
    for number, base in enumerate(bases):
        following = bases[number + 1] if number + 1 < len(bases) else None
        fd = files.open_for_read(f"{directory}/{base:020d}.arrows")
        try:
            reader = SegmentReader(files, fd)
            walk = Walk(schema_message_length(reader.read_at), base)
            for _, header in walk_batches(reader.read_at, reader.size, walk, SEED):
                if following is not None and header.base_offset >= following:
                    break
                yield base, header
        finally:
            files.close(fd)


def check_transaction_indexes(
    files: Files, directory: str, last_stable_offset: int, high_watermark: int
) -> int:
    """Compare a partition's indexes and its last stable offset with its headers. Returns the number
    of batches that readers of committed records leave out.
    """
    opened: dict[tuple[int, int], int] = {}
    ended: dict[tuple[int, int], int] = {}
    batches: list[tuple[int, BatchHeader]] = []
    for base, header in headers_in(files, directory):
        if header.base_offset >= high_watermark or not header.is_transactional:
            continue
        key = header.producer_id, header.producer_epoch
        if header.is_marker:
            ended[key] = header.control_type
        else:
            opened.setdefault(key, header.base_offset)
            batches.append((base, header))
    open_offsets = [offset for key, offset in opened.items() if key not in ended]
    assert last_stable_offset == min([*open_offsets, high_watermark])
    left_out = 0
    for base, header in batches:
        data = read_whole(files, f"{directory}/{base:020d}{TRANSACTION_INDEX_SUFFIX}")
        aborted = AbortedBatches(decode_transaction_index(data, base))
        if header.base_offset < last_stable_offset:
            key = header.producer_id, header.producer_epoch
            is_aborted = ended[key] == CONTROL_ABORT
            assert aborted.has(*key, header.base_offset) == is_aborted, (base, header)
            left_out += is_aborted
    return left_out
