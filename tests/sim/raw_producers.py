"""A program of a schedule that produces past the SDK: requests of many batches, a partition several
times, bad ones between them, and short timeouts.

It keeps to docs/protocol.md and is otherwise careless: several requests under way at once, batches
of a partition spread over them, answers that come too late for their request. What it does not know
of is sent again, in order, once nothing of its partition is under way.

Owner: one `tests.sim.schedule.Schedule`. Invariants: of a partition at most REMEMBERED_BATCHES
    batches are of unknown fate; what was sent keeps its bytes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from tailrace.admin.admin import Admin
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_json_now
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import REMEMBERED_BATCHES
from tailrace.format.record_batch.header_stamps import stamp_producer
from tailrace.kernel.reference_arrow import default_rows
from tailrace.protocol import credit_messages, produce_messages
from tailrace.protocol.frame import PRODUCE_FRAMES_MAX, Api
from tailrace.protocol.session import Response
from tests.kit.batches import TIME_US
from tests.kit.checker import History, name_of, value_of
from tests.sim.actors import TOPIC, Inbox
from tests.sim.machine.machine_parts import ADDRESS, MS, SECOND
from tests.sim.machine.world import World

RETRY_NS = 20 * MS
REQUESTS_MAX = 4
ATTEMPTS_MAX = 2_000
AGAIN = frozenset({
    ErrorCode.TIMED_OUT, ErrorCode.OUT_OF_ORDER_SEQUENCE, ErrorCode.NOT_READY,
    ErrorCode.SHUTTING_DOWN, ErrorCode.DISK_FULL, ErrorCode.TOO_MANY_REQUESTS,
    ErrorCode.TOO_MANY_PRODUCERS,
})  # fmt: skip


def raw_producer(
    world: World, rng: random.Random, history: History, acks: int, may_lose: bool
) -> RawProducerActor:
    """One that has its producer id and knows the topic; the appliance is well."""
    with Admin(ADDRESS, runtime=world.runtime) as admin:
        info = admin.topic_info([TOPIC])[TOPIC]
    connection = Connection(ADDRESS, "raw", world.runtime)
    producer_id = call_json_now(connection, Api.INIT_PRODUCER_ID, {}, 60_000)["producer_id"]
    return RawProducerActor("raw", connection, rng, history, info, acks, producer_id, may_lose)


@dataclass(slots=True)
class FrameSlice:
    """A batch of one record or more."""

    partition: int
    ordinal: int
    values: list[bytes]
    data: bytes


@dataclass(slots=True)
class Lane:
    """A partition, as this producer sees it."""

    next_sequence: int = 0
    next_ordinal: int = 0
    unknown: list[FrameSlice] = field(default_factory=list)
    """Records that are not acknowledged, in order; the first `sent_count` were sent since the last
    look at them.
    """
    sent_count: int = 0
    under_way: int = 0
    """Requests with batches of it."""
    must_repeat: bool = False
    attempts: int = 0
    given_up: ErrorCode | None = None


@dataclass(slots=True)
class RawProducerActor:
    """See the module's docstring."""

    name: str
    connection: Connection
    rng: random.Random
    history: History
    info: TopicInfo
    acks: int
    producer_id: int
    may_lose: bool
    """True if a partition may be given up: its disk has failed, or its state of this producer may
    be lost.
    """
    lanes: list[Lane] = field(default_factory=list)
    next_number: int = 0
    request_count: int = 0
    retry_at_ns: int = 0
    inbox: Inbox = field(default_factory=Inbox)
    sent_ns: dict[bytes, int] = field(default_factory=dict)
    answers: int = 0
    partly_late: int = 0
    """Answers in which some batches had timed out and others had not."""

    def __post_init__(self) -> None:
        self.lanes = [Lane() for _ in self.info.partitions]

    def turn(self) -> None:
        if self.rng.random() < 0.5:
            for _ in range(self.rng.randint(1, 4)):
                self._make(self.rng.randrange(len(self.lanes)))
        self.pump()

    def _make(self, partition: int) -> None:
        lane = self.lanes[partition]
        if lane.given_up is not None or (
            lane.unknown and lane.next_ordinal - lane.unknown[0].ordinal >= REMEMBERED_BATCHES
        ):
            return
        count = self.rng.randint(1, 3)
        values = [
            value_of(self.name, self.next_number + n, b"x" * self.rng.randint(0, 60))
            for n in range(count)
        ]
        self.next_number += count
        rows = default_rows([TIME_US] * count, [None] * count, list(values), None)
        seed = self.info.seeds[partition]
        data = arrow_batch.encode(
            rows,
            schema_id=self.info.schema_id,
            seed=seed,
            compression="none",
            first_timestamp_us=TIME_US,
            max_timestamp_us=TIME_US,
        )
        with memoryview(data) as view:
            stamp_producer(
                view,
                producer_id=self.producer_id,
                producer_epoch=0,
                base_sequence=lane.next_sequence,
                seed=seed,
            )
        lane.next_sequence += count
        lane.unknown.append(FrameSlice(partition, lane.next_ordinal, values, bytes(data)))
        lane.next_ordinal += 1
        for value in values:
            self.sent_ns[value] = self.connection.now_ns()
            self.history.send(partition, value)

    # ---- sending ---------------------------------------------------------------------------------

    def pump(self) -> None:
        self.connection.process()
        self.connection.tick(self.connection.now_ns())
        self.inbox.handle()
        now_ns = self.connection.now_ns()
        for lane in self.lanes:
            if lane.must_repeat and not lane.under_way and now_ns >= self.retry_at_ns:
                lane.must_repeat, lane.sent_count = False, 0
        if self.connection.is_ready and self.request_count < REQUESTS_MAX:
            pieces = self._chosen()
            if pieces:
                self._send(pieces)

    def _chosen(self) -> list[FrameSlice]:
        """Some of what waits: a partition's batches in order, those of others between them."""
        waiting = {
            partition: lane.unknown[lane.sent_count :]
            for partition, lane in enumerate(self.lanes)
            if not lane.must_repeat and lane.given_up is None
        }
        chosen = []
        for partition, pieces in waiting.items():
            if self.rng.random() < 0.8:
                chosen += [partition] * self.rng.randint(0, len(pieces))
        self.rng.shuffle(chosen)
        return [waiting[partition].pop(0) for partition in chosen]

    def _send(self, pieces: list[FrameSlice]) -> None:
        made: list[tuple[bytes, int, bytes, FrameSlice | None]] = [
            (self.info.topic_id, p.partition, p.data, p) for p in pieces
        ]
        if self.rng.random() < 0.2:  # what goes nowhere, somewhere between
            bad = self.rng.choice(
                (
                    (bytes(16), 0, b"?" * 200),
                    (self.info.topic_id, len(self.lanes), b"?" * 200),
                    (self.info.topic_id, 0, b""),
                )
            )
            made.insert(self.rng.randrange(len(made) + 1), (*bad, None))
        batches = [data for _, _, data, _ in made]
        size = sum(map(len, batches))
        session = self.connection.session
        if not session.may_send(size):
            self.connection.request(Api.CREDIT, [credit_messages.encode_credit(size)], None)
            self.retry_at_ns = self.connection.now_ns() + RETRY_NS
            return
        entries = [
            produce_messages.ProduceEntry(
                topic_id, partition, self.info.slot_map_version, len(data)
            )
            for topic_id, partition, data, _ in made
        ]
        head = produce_messages.encode_produce_batches(
            produce_messages.ProduceBatches(self.acks, self.rng.choice((1, 5, 30, 3_000)), entries)
        )
        most = min(len(batches), PRODUCE_FRAMES_MAX) - 1
        cuts = [
            0,
            *sorted(self.rng.sample(range(1, len(batches)), self.rng.randrange(most + 1))),
            len(batches),
        ]
        frames = [b"".join(batches[a:b]) for a, b in pairwise(cuts)]
        if not self.connection.request(
            Api.PRODUCE,
            [head, *frames],
            self.inbox.later(partial(self._on_answer, [piece for *_, piece in made])),
        ):
            return
        session.sent_bytes += size
        self.request_count += 1
        for partition in {piece.partition for piece in pieces}:
            self.lanes[partition].under_way += 1
        for piece in pieces:
            self.lanes[piece.partition].sent_count += 1

    # ---- answers ---------------------------------------------------------------------------------

    def _on_answer(self, pieces: list[FrameSlice | None], response: Response | None) -> None:
        self.request_count -= 1
        for partition in {piece.partition for piece in pieces if piece is not None}:
            self.lanes[partition].under_way -= 1
        if response is None or response.code is not ErrorCode.OK:
            assert response is None or response.code in (
                ErrorCode.TOO_MANY_REQUESTS,
                ErrorCode.NOT_READY,
            ), f"{response.code}: {response.detail()}"
            entries = [produce_messages.ProducedEntry(ErrorCode.TIMED_OUT, 0, -1, -1, -1)] * len(
                pieces
            )
        else:
            entries = produce_messages.decode_produced_batches(response.body[0])
            self.answers += 1
            self.partly_late += (
                len({entry.error for entry in entries} & {0, ErrorCode.TIMED_OUT}) == 2
            )
        assert len(entries) == len(pieces), "an entry for each batch"
        for piece, entry in zip(pieces, entries, strict=True):
            if piece is not None:
                self._take(self.lanes[piece.partition], piece, entry)
            elif response is not None and response.code is ErrorCode.OK:
                assert entry.error in (
                    ErrorCode.UNKNOWN_TOPIC,
                    ErrorCode.PARTITION_OUT_OF_RANGE,
                    ErrorCode.UNSUPPORTED_BATCH,
                ), entry

    def _take(self, lane: Lane, piece: FrameSlice, entry: produce_messages.ProducedEntry) -> None:
        code = ErrorCode(entry.error)
        if code is ErrorCode.OK:
            for number, value in enumerate(piece.values):
                known = self.history.acknowledged.get((piece.partition, name_of(value)))
                assert known in (None, entry.base_offset + number), (
                    f"{value!r} was acknowledged at {known}, now at {entry.base_offset + number}"
                )
                self.history.acknowledge(piece.partition, value, entry.base_offset + number)
            if piece in lane.unknown:
                lane.sent_count -= lane.unknown.index(piece) < lane.sent_count
                lane.unknown.remove(piece)
            return
        lane.must_repeat = True
        lane.attempts += 1
        self.retry_at_ns = self.connection.now_ns() + RETRY_NS
        if code not in AGAIN or lane.attempts > ATTEMPTS_MAX:
            assert self.may_lose, (
                f"partition {piece.partition} refuses what it should take: {code.name}"
            )
            lane.given_up = code
            lane.unknown.clear()
            lane.sent_count = 0

    @property
    def incomplete_count(self) -> int:
        return sum(len(lane.unknown) + lane.under_way for lane in self.lanes)

    def next_wake_ns(self, now_ns: int) -> int:
        tick_ns = self.connection.next_tick_ns()
        wake_ns = now_ns + SECOND if tick_ns is None else tick_ns
        return (
            min(wake_ns, max(self.retry_at_ns, now_ns + MS)) if self.incomplete_count else wake_ns
        )

    def has_input(self) -> bool:
        socket = self.connection._socket
        return socket is not None and bool(socket.link.to_client)  # type: ignore[attr-defined]
