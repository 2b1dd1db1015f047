"""Idempotent producers against a Bench (worker and flusher stepped by hand), with a history for the
checker.

Each producer keeps up to five batches under way per partition and sends what was not acknowledged
again, in order, when everything was restarted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from shm.memory.layout import Verdict
from shm.messages.lane_messages import Assignment
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.core.error_codes import ErrorCode
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.record_batch.batch_header import checksum_seed
from tailrace.format.record_batch.header_stamps import stamp_producer
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.format.segments.segment import (
    Walk,
    file_name,
    schema_message_length,
    segment_bases,
    walk_batches,
)
from tailrace.kernel.reference_arrow import default_rows
from tests.kit.batches import TIME_US, TOPIC_ID
from tests.kit.checker import History, value_of
from tests.kit.log_files.logs import Bench, assignment, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.flush.flusher_settings import FlusherSettings
from workers.segment.files import Files, read_whole

IN_FLIGHT_MAX = 5


@dataclass(slots=True)
class Sent:
    values: list[bytes]
    sequence: int
    data: bytearray


@dataclass(slots=True)
class Producer:
    """One producer's way to one partition."""

    name: str
    number: int
    partition: int
    next_value: int = 0
    sequence: int = 0
    epoch: int = 0
    unacknowledged: list[Sent] = field(default_factory=list)


class Workload:
    """Drives producers; `step` does one random thing."""

    def __init__(
        self,
        bench: Bench,
        rng: random.Random,
        *,
        producers: int = 2,
        partitions: int = 1,
        batch_records: int = 3,
    ) -> None:
        self.bench = bench
        self.rng = rng
        self.history = History()
        self.producers = [
            Producer(f"p{n}", n + 1, partition)
            for n in range(producers)
            for partition in range(partitions)
        ]
        self._batch_records = batch_records
        self.refusals = 0
        self._by_correlation: dict[int, tuple[Producer, Sent]] = {}
        self._next_correlation = 1
        self._cursor = bench.ring.settled.load()

    def send(self, producer: Producer | None = None) -> None:
        """One more batch of one producer, if it may."""
        producer = producer or self.rng.choice(self.producers)
        if len(producer.unacknowledged) >= IN_FLIGHT_MAX:
            return
        count = self.rng.randint(1, self._batch_records)
        values = [
            value_of(producer.name, producer.next_value + n, b"x" * self.rng.randint(0, 60))
            for n in range(count)
        ]
        producer.next_value += count
        seed = checksum_seed(TOPIC_ID, producer.partition)
        rows = default_rows([TIME_US] * count, [None] * count, list(values), None)
        data = arrow_batch.encode(
            rows,
            schema_id=1,
            seed=seed,
            compression="none",
            first_timestamp_us=TIME_US,
            max_timestamp_us=TIME_US,
        )
        with memoryview(data) as view:
            stamp_producer(
                view,
                producer_id=producer.number,
                producer_epoch=producer.epoch,
                base_sequence=producer.sequence,
                seed=seed,
            )
        sent = Sent(values, producer.sequence, data)
        producer.sequence += count
        producer.unacknowledged.append(sent)
        for value in values:
            self.history.send(producer.partition, value)
        self._post(producer, sent)

    def _post(self, producer: Producer, sent: Sent) -> None:
        correlation_id = self._next_correlation
        self._next_correlation += 1
        self._by_correlation[correlation_id] = producer, sent
        self.bench.send(sent.data, slot=producer.partition, correlation_id=correlation_id)

    def drain_answers(self) -> None:
        """Take what has been settled since, and the watermarks that a consumer would see."""
        bench = self.bench
        settled = bench.ring.settled.load()
        for number in range(self._cursor, settled):
            descriptor = bench.ring.descriptor(number)
            if descriptor.is_control:
                continue
            known = self._by_correlation.pop(descriptor.correlation_id, None)
            if known is None:
                continue
            producer, sent = known
            verdict = bench.ring.outcome(number).verdict
            if verdict is Verdict.FAILED or descriptor.result in (
                ErrorCode.PARTITION_OFFLINE,
                ErrorCode.DISK_FULL,
            ):
                self.refusals += 1
                self._abandon(producer)
            elif descriptor.result:
                given_up = not any(s is sent for s in producer.unacknowledged)
                assert given_up or descriptor.result == ErrorCode.OUT_OF_ORDER_SEQUENCE, ErrorCode(
                    descriptor.result
                ).name
            elif verdict in (Verdict.DURABLE, Verdict.WRITTEN):
                for index, value in enumerate(sent.values):
                    self.history.acknowledge(
                        producer.partition, value, descriptor.base_offset + index
                    )
                producer.unacknowledged = [s for s in producer.unacknowledged if s is not sent]
        self._cursor = settled
        bench.ring.cursors[0].store(settled)
        for item in bench.assignments:
            self.history.see_watermark(item.partition, bench.table.read(item.slot).high_watermark)

    @staticmethod
    def _abandon(producer: Producer) -> None:
        """A batch was refused for good: as the SDK does, a new epoch, and what was under way is not
        sent again.
        """
        producer.unacknowledged = []
        producer.epoch += 1
        producer.sequence = 0

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.45:
            self.send()
        elif choice < 0.7:
            self.bench.step_worker()
        else:
            self.bench.step_flusher()
            self.drain_answers()

    def settle(self) -> None:
        """Everything that was sent is answered."""
        while not self.bench.is_running:
            self.bench.step_flusher()
        while self.bench.step_worker() + self.bench.step_flusher():
            self.drain_answers()

    def go_on(self, bench: Bench) -> None:
        """After a restart of everything: send again, in order, what was not acknowledged."""
        self.bench = bench
        self._cursor = bench.ring.settled.load()
        self._by_correlation = {}
        for producer in self.producers:
            for sent in producer.unacknowledged:
                self._post(producer, sent)
                self.settle()  # the bench's lanes are small

    def readable(self) -> dict[int, list[tuple[int, bytes]]]:
        """partition -> (offset, value) of everything below the high watermark, from the files."""
        result = {}
        for item in self.bench.assignments:
            limit = self.bench.table.read(item.slot).high_watermark
            directory = f"{self.bench.directory}/{item.directory_name}"
            result[item.partition] = list(read_log(self.bench.files, directory, limit))
        return result


def decode_values(batch: bytes) -> list[bytes]:
    """The values of one batch, through pyarrow alone."""
    values: list[bytes] = (
        pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(batch)), DEFAULT_SCHEMA)
        .column(2)
        .to_pylist()
    )
    return values


def read_log(files: Files, directory: str, limit: int) -> Iterator[tuple[int, bytes]]:
    """(offset, value) of a partition's files, up to offset `limit`."""
    known = PartitionMetadata.decode(read_whole(files, f"{directory}/{PARTITION_FILE}"))
    assert known is not None
    bases = segment_bases(files.list(directory))
    for number, base in enumerate(bases):
        end = bases[number + 1] if number + 1 < len(bases) else limit
        data = read_whole(files, f"{directory}/{file_name(base)}")

        def read_at(length: int, position: int, data: bytes = data) -> bytes:
            return data[position : position + length]

        walk = Walk(schema_message_length(read_at), base)
        for position, header in walk_batches(read_at, len(data), walk, known.seed):
            if header.base_offset >= end:
                break
            batch = data[position : position + header.batch_length]
            for index, value in enumerate(decode_values(batch)):
                if known.log_start_offset <= header.base_offset + index < limit:
                    yield header.base_offset + index, value
        assert walk.next_offset >= end or base == bases[-1], (
            f"{directory}: segment {base} ends at {walk.next_offset}, {end} follows: {walk.reason}"
        )


SETTINGS = FlusherSettings(checkpoint_bytes=12 << 10, journal_bytes=64 << 10)


def boot(disk: SimDisk, run: int, partitions: int, **settings: Any) -> Bench:
    return Bench(
        "/data", simulated_regions(), SimFiles(disk), SETTINGS,
        assignments=assignments(partitions, **settings), run=f"run-{run}", lost_memory=run > 0,
        now_us=1_700_000_000_000_000 + run * 10**9,
    )  # fmt: skip


def assignments(partitions: int, **settings: Any) -> list[Assignment]:
    items = [assignment(p, slot=p, **settings) for p in range(partitions)]
    for item in items:
        item.settings["segment.bytes"] = (
            6000  # far below what users may set: rolls in every schedule
        )
    return items
