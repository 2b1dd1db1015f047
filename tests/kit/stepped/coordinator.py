"""A scripted transaction coordinator: a test says what was decided, and reads what the worker of a
`Bench` reports.
"""

from __future__ import annotations

from shm.memory.layout import ProcessWord, Role
from shm.messages.lane_messages import LaneKind
from shm.messages.transaction_messages import (
    DecidedTransaction,
    Decision,
    Outcome,
    ProducerEpoch,
    RegisteredProducer,
    Registration,
    Settled,
    decode_epochs,
    decode_settled,
    encode_decisions,
)
from shm.queues.lane import LaneReader, LaneWriter
from shm.tables.control import Control
from tailrace.core.error_codes import ErrorCode
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS, checksum_seed
from tailrace.format.segments.segment import (
    Walk,
    file_name,
    schema_message_length,
    segment_bases,
    walk_batches,
)
from tests.kit.batches import TOPIC_ID, make_batch
from tests.kit.log_files.logs import Bench, assignment, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.append.coordinator_reports import OPENED_AFTER_NS
from workers.flush.flusher_settings import FlusherSettings
from workers.segment.files import read_whole

PID = TRANSACTIONAL_PRODUCER_IDS
COMMIT, ABORT = Outcome.COMMIT, Outcome.ABORT
SEALED = Registration.SEALED
FENCED, NOT_YET = int(ErrorCode.PRODUCER_FENCED), int(ErrorCode.CONCURRENT_TRANSACTIONS)


class Coordinator:
    """Rows that are not carried out, registrations, and the lanes to a bench's worker."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.ordinal = 0
        self.rows: dict[int, Decision] = {}
        self.registered: dict[int, tuple[int, list[RegisteredProducer]]] = {}
        """Number of a transactional id -> ordinal, its producers."""
        self.settled = Settled(0)
        self.opened: list[ProducerEpoch] = []
        self.asked: list[ProducerEpoch] = []
        self.connected: list[int] = []
        self.attach()

    def attach(self) -> None:
        """Make the lanes known to the worker, also after a restart of everything."""
        regions = self.bench.regions
        self.lane = LaneWriter(regions["groups>worker"])
        self.reports = LaneReader(regions["worker>groups"])
        slot = Control(regions["control"]).process(Role.WORKER, 0)
        slot.store(ProcessWord.TRANSACTION_LANES, 1)

    def send(self, kind: LaneKind, payload: bytes = b"", correlation_id: int = 0) -> None:
        assert self.lane.try_write(kind, 0, 0, 0, correlation_id, 0, (payload,))
        self.lane.commit()

    @property
    def generation(self) -> int:
        return self.bench.worker._generation

    def feed(self, generation: int | None = None) -> None:
        """Send all rows and registrations."""
        self.send(LaneKind.TRANSACTIONS_FEED)
        rows = [self.rows[ordinal] for ordinal in sorted(self.rows)]
        registered = [
            Decision(ordinal, id_number, [], producers)
            for id_number, (ordinal, producers) in self.registered.items()
        ]
        self.send(LaneKind.DECISIONS, encode_decisions([*rows, *registered]))
        self.send(
            LaneKind.TRANSACTIONS_FED,
            correlation_id=self.generation if generation is None else generation,
        )

    def decide(
        self,
        id_number: int,
        ended: list[tuple[int, int, Outcome]],
        registered: list[tuple[int, int] | tuple[int, int, Registration]],
        *,
        is_sent: bool = True,
    ) -> int:
        """Decide durably, and send the decision. Returns its ordinal."""
        self.ordinal += 1
        producers = [RegisteredProducer(*producer) for producer in registered]
        outcomes = [DecidedTransaction(*outcome) for outcome in ended]
        decision = Decision(self.ordinal, id_number, outcomes, producers)
        self.registered[id_number] = self.ordinal, producers
        if outcomes:
            self.rows[self.ordinal] = decision
        if is_sent:
            self.resend(decision)
        return self.ordinal

    def resend(self, *decisions: Decision) -> None:
        self.send(LaneKind.DECISIONS, encode_decisions(decisions))

    def read(self) -> None:
        """Read the worker's reports."""
        while (message := self.reports.peek()) is not None:
            kind, payload = message.kind, bytes(message.payload)
            generation = message.correlation_id
            self.reports.advance(message)
            self.reports.consume()
            if kind == LaneKind.TRANSACTIONS_CONNECTED:
                self.connected.append(generation)
            elif kind == LaneKind.OPENED:
                self.opened += decode_epochs(payload)
            elif kind == LaneKind.ASK_OUTCOME:
                self.asked += decode_epochs(payload)
            else:
                assert kind == LaneKind.SETTLED
                self.settled = decode_settled(payload)
                for ordinal in list(self.rows):
                    if ordinal <= self.settled.ordinal and ordinal not in self.settled.unfinished:
                        del self.rows[ordinal]

    def answer(self, *outcomes: tuple[int, int, Outcome]) -> None:
        """Answer ASK_OUTCOME."""
        self.resend(Decision(0, 0, [DecidedTransaction(*outcome) for outcome in outcomes], []))

    def settle(self) -> None:
        """Step everything until nothing is left to do, and the worker's reports are due."""
        self.bench.settle()
        self.bench.step_worker()
        self.bench.now_ns += OPENED_AFTER_NS
        self.bench.step_worker()
        self.bench.settle()
        self.read()


def transactional(
    producer_id: int = PID, epoch: int = 0, sequence: int = 0, *, count: int = 2, partition: int = 0
) -> bytearray:
    """A batch of a transaction."""
    return make_batch(
        count, producer_id=producer_id, epoch=epoch, sequence=sequence,
        seed=checksum_seed(TOPIC_ID, partition),
    )  # fmt: skip


Entry = tuple[int, int, int, int]
"""(base offset, producer id - PID, epoch, control type)"""


def log_of(bench: Bench, partition: int = 0) -> list[Entry]:
    """Transactions in a partition's files."""
    files = bench.files
    directory = f"{bench.directory}/t-{partition}"
    known = PartitionMetadata.decode(read_whole(files, f"{directory}/{PARTITION_FILE}"))
    assert known is not None
    found: list[Entry] = []
    for base in segment_bases(files.list(directory)):
        data = read_whole(files, f"{directory}/{file_name(base)}")

        def read_at(length: int, position: int, data: bytes = data) -> bytes:
            return data[position : position + length]

        walk = Walk(schema_message_length(read_at), base)
        for _, header in walk_batches(read_at, len(data), walk, known.seed):
            if header.is_transactional:
                assert header.is_control == bool(header.control_type)
                found.append(
                    (
                        header.base_offset,
                        header.producer_id - PID,
                        header.producer_epoch,
                        header.control_type,
                    )
                )
    return found


def ends_of(bench: Bench, partition: int = 0) -> list[tuple[int, int, int]]:
    """Markers of a partition's files: (producer id - PID, epoch, control type)."""
    return [entry[1:] for entry in log_of(bench, partition) if entry[3]]


def make_bench(partitions: int = 1, *, ring_bytes: int = 1 << 18, descriptors: int = 256) -> Bench:
    """A worker and a flusher that serve partitions of one topic."""
    made = Bench(
        "/data", simulated_regions(ring_bytes, descriptors), SimFiles(SimDisk()),
        FlusherSettings(checkpoint_bytes=12 << 10, journal_bytes=1 << 20),
        assignments=[assignment(n, slot=n) for n in range(partitions)],
    )  # fmt: skip
    made.settle()
    return made


def results(it: Bench, *batches: bytes | bytearray, slot: int = 0) -> list[int]:
    """Send batches and return the workers' answers, after everything is settled."""
    seen = it.ring.producer_position.load()
    for number, batch in enumerate(batches):
        it.send(batch, slot=slot, correlation_id=1000 + number)
    it.settle()
    found = map(it.ring.descriptor, range(seen, it.ring.producer_position.load()))
    return [d.result for d in found if d.source_lane == 0]
