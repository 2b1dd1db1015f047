"""One schedule of compacted topics: a world, writers, transactional programs, readers of both
levels, somebody who asks for cleanings, faults, all from one seed. Then everything is healed, comes
to rest, is cleaned, and is checked.

A schedule that fails is replayed by `run(seed)`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from appliance.config.default_schema import DEFAULT_SCHEMA_MESSAGE
from appliance.config.topic_settings import TOPIC_SETTINGS
from shm.memory.layout import Role
from tailrace.admin.admin import Admin
from tailrace.client.connections.connection import Connection
from tailrace.core.errors import OffsetOutOfRangeError, TailraceError
from tailrace.core.records import RecordMetadata
from tailrace.core.topic_partition import TopicPartition
from tailrace.kernel import KeyOffsets
from tailrace.producer.producer import Producer
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import Api
from tests.kit.batches import TIME_US
from tests.sim.compaction.policies import MERGED, Policies, policies_of, starts
from tests.sim.compaction.table_history import Pass, Seen, TableHistory
from tests.sim.machine.machine_parts import ADDRESS, MS, SECOND
from tests.sim.machine.world import World
from tests.sim.schedule import abandon
from tests.sim.transactions.programs import Common, Program
from tests.sim.transactions.schedule import FAULTS as TRANSACTION_FAULTS
from tests.sim.transactions.schedule import QUIET, WRITTEN, TransactionSchedule
from workers.clean import cleaner, merging_pass, superseded
from workers.clean.merging_pass import MergingPass
from workers.log.retention import merging_rules

FAULTS = (
    *TRANSACTION_FAULTS, "kill cleaner", "kill cleaner", "kill flusher", "full disk",
    "clock in a pass",
)  # fmt: skip
HOUR_US = 3_600_000_000
NEVER_MS = 1 << 52


class TableReader:
    """Somebody who reads all the time, now and then from the beginning again."""

    def __init__(self, schedule: CompactionSchedule, *, is_committed: bool) -> None:
        self.is_committed = is_committed
        self.consumer = schedule.consumer(schedule.places, is_committed=is_committed)
        self._schedule = schedule
        self._rng = random.Random(f"reader {is_committed} of {schedule.seed}")
        self.reading = Pass(schedule.world.now_ns)
        self._rest_until_ns = 0

    def turn(self) -> None:
        if self._rng.random() < 0.01:
            self._begin_again()
        elif self._rng.random() < 0.02:
            self._rest_until_ns = self._schedule.world.now_ns + self._rng.randrange(1, 400) * MS
        self.pump()

    def _begin_again(self) -> None:
        schedule = self._schedule
        if self.is_committed:
            schedule.table.check_pass(self.reading, {}, schedule.world.now_ns)
        for place in schedule.places:
            self.consumer.seek(place, 0)
        self.reading = Pass(schedule.world.now_ns)

    def pump(self) -> None:
        now_ns = self._schedule.world.now_ns
        if now_ns < self._rest_until_ns:
            return
        try:
            records = self.consumer.poll(0)
        except OffsetOutOfRangeError:
            self._go_on_at_the_start()
            return
        except TailraceError as error:
            if error.code not in QUIET:
                raise
            return
        for record in records:
            self._schedule.table.read(self.reading, record, is_committed=self.is_committed)

    def _go_on_at_the_start(self) -> None:
        schedule = self._schedule
        assert schedule.policies is not None, "a reader fell out of a log of which nothing expires"
        schedule.observe_starts()
        for place, start in schedule.table.starts.items():
            if self.consumer.position(place) < start:
                self.consumer.seek(place, start)

    def next_wake_ns(self, now_ns: int) -> int:
        tick_ns = self.consumer._connection.next_tick_ns()
        return now_ns + 50 * MS if tick_ns is None else tick_ns

    def is_ready(self, now_ns: int) -> bool:
        """True if it has something to do."""
        socket: Any = self.consumer._connection._socket
        has_input = socket is not None and bool(socket.link.to_client)
        return has_input or self.next_wake_ns(now_ns) <= now_ns


class Writer:
    """A program that writes rows and tombstones outside of transactions."""

    def __init__(self, name: str, schedule: CompactionSchedule, rng: random.Random) -> None:
        self._name = name
        self._schedule = schedule
        self._rng = rng
        self._count = 0
        self.refusals: list[TailraceError | None] = []
        self.producer = Producer(
            ADDRESS, runtime=schedule.world.runtime, acks="all", linger_ms=rng.choice((0, 5)),
            compression_type="none", request_timeout_ms=3000, delivery_timeout_ms=3_600_000,
            retry_backoff_ms=20,
        )  # fmt: skip
        self.producer.partitions_for(WRITTEN)

    @property
    def thread(self) -> Any:
        return self.producer._sender_thread

    def turn(self) -> None:
        if self._rng.random() < 0.7 and self.thread.accumulator.incomplete_count < 12:
            for _ in range(self._rng.randint(1, 4)):
                self._send()
            if self._rng.random() < 0.5:
                with self.thread.lock:
                    self.thread.close_all()
        self.pump()

    def _send(self) -> None:
        schedule, rng = self._schedule, self._rng
        place = rng.choice(schedule.places)
        key = b"k%d" % rng.randrange(schedule.key_count)
        self._count += 1
        value = b"%b-%d-%b" % (self._name.encode(), self._count, b"x" * rng.randint(0, 60))
        given = None if rng.random() < 0.25 else value
        stamp_ms = schedule.table.send(place, key, given, schedule.world.now_ns)
        self.producer.send(
            place.topic, given, key, partition=place.partition, timestamp=stamp_ms,
            on_delivery=partial(self._on_delivery, stamp_ms),
        )  # fmt: skip

    def _on_delivery(
        self, stamp_ms: int, metadata: RecordMetadata | None, error: TailraceError | None
    ) -> None:
        if metadata is None:
            self.refusals.append(error)
            return
        assert metadata.offset is not None
        self._schedule.table.acknowledge(stamp_ms, metadata.offset)

    def pump(self) -> None:
        with self.thread.lock:
            self.thread.run_once()
        self.thread.make_callbacks()

    @property
    def is_at_rest(self) -> bool:
        with self.thread.lock:
            self.thread.close_all()  # reads answers, too
        self.thread.make_callbacks()
        return not self.thread.accumulator.incomplete_count

    def next_wake_ns(self, now_ns: int) -> int:
        wake_ns: int = self.thread.next_wake_ns(now_ns)
        return wake_ns

    def is_ready(self, now_ns: int) -> bool:
        """True if it has something to do."""
        socket: Any = self.thread.connection._socket
        has_input = socket is not None and bool(socket.link.to_client)
        return has_input or self.next_wake_ns(now_ns) <= now_ns


class Operator:
    """Somebody who asks for cleanings, and does not wait; and whose leases keep segments."""

    def __init__(self, schedule: CompactionSchedule) -> None:
        self._schedule = schedule
        self._rng = random.Random(f"operator of {schedule.seed}")
        self._connection = Connection(ADDRESS, "operator", schedule.world.runtime)

    def turn(self) -> None:
        self.pump()
        if not self._connection.is_ready or self._rng.random() > 0.15:
            return
        if self._rng.random() < 0.6:
            self._ask(Api.COMPACT_TOPIC, {"name": WRITTEN})
        else:
            place = self._rng.choice(self._schedule.places)
            lease = {"topic": place.topic, "partition": place.partition, "offset": 0}
            ttl_ms = self._rng.choice((0, 0, 200, 1_000))
            self._ask(Api.LEASE_OFFSETS, {"lease": "scan", "ttl_ms": ttl_ms, **lease})

    def _ask(self, api: Api, body: dict[str, Any]) -> None:
        self._connection.request(api, [requests.encode_json(body)], lambda _: None)

    def pump(self) -> None:
        self._connection.process()
        self._connection.tick(self._connection.now_ns())

    def next_wake_ns(self, now_ns: int) -> int:
        tick_ns = self._connection.next_tick_ns()
        return now_ns + SECOND if tick_ns is None else tick_ns

    def is_ready(self, now_ns: int) -> bool:
        """True if it has something to do."""
        socket: Any = self._connection._socket
        has_input = socket is not None and bool(socket.link.to_client)
        return has_input or self.next_wake_ns(now_ns) <= now_ns


class CompactionSchedule(TransactionSchedule):
    """One seed's world."""

    TOPICS = (WRITTEN,)

    def __init__(self, seed: int, faults: Sequence[str] | None = None) -> None:
        """`faults`: those that happen; None: a choice of the seed's."""
        super().__init__(seed, faults)
        rng = self.rng = random.Random(f"compaction {seed}")
        self.seed = seed
        self.members_rng = None
        self.steps = rng.randint(500, 1_000)
        if faults is None:
            self.faults = sorted({rng.choice(FAULTS) for _ in range(rng.randint(1, 5))})
        self.world = World(rng, workers=rng.randint(1, 2), data_dirs=rng.choice((1, 1, 2)))
        if seed % 2:
            self.world.preempts = random.Random(f"preemptions of {seed}")
        self.world.child_settings |= {
            "cleaner.check.interval.ms": rng.choice((20, 100)),
            "cleaner.dedupe.buffer.size": rng.choice((24 * 8, 1 << 20)),
        }
        self.written = self.places = [TopicPartition(WRITTEN, p) for p in range(rng.randint(1, 2))]
        self.made = []
        self.key_count = rng.choice((1, 5, 12, 40))
        self.lag_ms = rng.choice((0, 0, 200))
        """A clock that was set keeps records young for as long as it was moved."""
        self.retention_ms = rng.choice((0, 300, 60_000, 86_400_000))
        self.table = TableHistory(self.key_count, self.retention_ms * MS)
        self.history = self.table.transactions
        self.writers: list[Writer] = []
        self.table_readers: list[TableReader] = []
        self.operator: Operator | None = None
        self.partitions: list[dict[str, Any]] = []
        """As the last cleaning has left them."""
        self.cleaned_bytes = 0
        self.topic_id = b""
        self.policies: Policies | None = policies_of(self)
        self.merged = Merged()

    @property
    def may_refuse(self) -> bool:
        """True if a producer may be told that a record is lost."""
        return "disk error" in self.faults

    @property
    def actors(self) -> list[Any]:
        others = [one for one in (self.operator, self.policies) if one is not None]
        return [*self.programs, *self.writers, *self.table_readers, *others]

    @property
    def is_compacted(self) -> bool:
        """True if the topic is compacted in the end."""
        return self.policies is None or self.policies.kind != MERGED

    def observe_starts(self) -> None:
        """Check and note where the partitions begin."""
        for place, start in starts(self).items():
            before = self.table.starts[place]
            if start > before:
                assert self.policies is not None, f"{place} begins at {start}: nothing expires"
                self.policies.check_start(place, before, start)
                self.table.starts[place] = start

    def run(self) -> None:
        """Raises AssertionError."""
        try:
            with stepped_cleaner(random.Random(f"cleaner of {self.seed}"), self.merged):
                super().run()
        finally:
            for writer in self.writers:
                abandon(writer.thread)

    def _set_up(self) -> None:
        world, rng = self.world, self.rng
        catalog = world.open_catalog()
        catalog.slots.register([(path, path) for path in world.data_dirs])
        given: dict[str, Any] = {
            "segment.bytes": rng.choice((1_500, 4_000)), "durability": "disk",
            "cleanup.policy": "compact", "delete.retention.ms": self.retention_ms,
            "min.cleanable.dirty.ratio": rng.choice((0.0, 0.5)),
            "min.compaction.lag.ms": self.lag_ms,
            "max.compaction.lag.ms": rng.choice((300, NEVER_MS)),
        }  # fmt: skip
        if self.policies is not None:
            given |= self.policies.first()
        catalog.create_topic(
            WRITTEN, len(self.places), given, DEFAULT_SCHEMA_MESSAGE, False, TIME_US
        )
        catalog.close()
        world.boot()
        world.settle_servers()
        with Admin(ADDRESS, runtime=world.runtime) as admin:
            topics = admin.topic_info([WRITTEN])
        common = Common(world, rng, self.history, topics, self.table.key_of, keeps_markers=False)
        for number in range(rng.randint(0, 2)):
            timeout_ms = rng.choice((500, 5_000, 60_000))
            self.programs.append(Program(f"w{number}", common, self.places, timeout_ms))
        for number in range(rng.randint(1, 2)):
            self.writers.append(Writer(f"p{number}", self, rng))
        self.table_readers = [
            TableReader(self, is_committed=True),
            TableReader(self, is_committed=False),
        ]
        self.topic_id = topics[WRITTEN].topic_id
        self.operator = Operator(self)
        if self.policies is not None:
            self.policies.begin()

    def _fault(self, fault: str) -> None:
        world, rng = self.world, self.rng
        role = {"kill cleaner": Role.CLEANER, "kill flusher": Role.FLUSHER}.get(fault)
        if fault == "full disk":
            self.log.append(f"{world.steps}: {fault}")
            world.disk.free = 0 if world.disk.free else 1 << 40
        elif fault == "clock in a pass":
            self.log.append(f"{world.steps}: {fault}")
            for child in [one for one in world.children if one.role is Role.CLEANER]:
                for _ in range(rng.randint(1, 3)):
                    if child.agent is not None and world.is_runnable(child):
                        world.step(child)
            world.wall_offset_us += HOUR_US
        elif role is None:
            super()._fault(fault)
        else:
            self.log.append(f"{world.steps}: {fault}")
            for child in [one for one in world.children if one.role is role]:
                world.fate.doom(rng.randint(0, 25))
                for _ in range(8):
                    if child.agent is not None and world.is_runnable(child):
                        world.step(child)
                world.fate.pardon()

    # ---- the end ---------------------------------------------------------------------------------

    def _heal(self) -> None:
        world = self.world
        super()._heal()
        deadline_ns = world.now_ns + 120 * SECOND
        while not all(writer.is_at_rest for writer in self.writers):
            assert world.now_ns < deadline_ns, "the writers do not come to rest"
            self._quiet_step()
        self.operator = None
        if self.is_compacted and self.policies is not None:
            with Admin(ADDRESS, runtime=world.runtime) as admin:
                admin.alter_topics({WRITTEN: self.policies.last()})
            world.settle_servers()
        self.observe_starts()
        begun = dict(self.table.starts)
        rest_ns = world.now_ns + 2 * SECOND  # leases end, records reach their lag
        while world.now_ns < rest_ns:
            world.settle_servers()
            world.pass_time(rest_ns)
        if self.is_compacted:
            with Admin(ADDRESS, runtime=world.runtime) as admin:
                self.partitions = admin.compact_topic(WRITTEN, timeout_ms=600_000)
            world.settle_servers()
        assert starts(self) == begun, f"nothing expires any more, and {begun} has moved"
        self.cleaned_bytes = sum(each["clean_bytes"] for each in self.partitions)

    def _check(self) -> None:
        world = self.world
        refusals = [error for writer in self.writers for error in writer.refusals]
        assert self.may_refuse or not refusals, f"records were refused: {refusals[:3]}"
        first = self._read_table()
        for place in () if self.is_compacted else self.places:
            self.table.check_all(place, first[place])
        for partition in self.partitions:
            place = TopicPartition(WRITTEN, partition["partition"])
            self.table.check_log(place, first[place], partition["cleaned_below"], world.now_ns)
            is_clean = partition["cleaned_below"] >= partition["log_end_offset"]
            may_wait = self.lag_ms and any(each.startswith("clock") for each in self.faults)
            assert is_clean or may_wait, (
                f"{place} is clean up to {partition['cleaned_below']} only: {partition}"
            )
        world.kill_all()
        world.settle_servers()
        again = self._read_table()
        for place in self.places:
            may_lose = self.retention_ms and self.is_compacted  # tombstones whose time is over
            assert again[place] == first[place] or may_lose, f"{place}: after a start"

    def _read_table(self) -> dict[TopicPartition, list[Seen]]:
        """All committed records; every reader goes on to the end, too."""
        world = self.world
        found: dict[TopicPartition, list[Seen]] = {place: [] for place in self.places}
        reading = Pass(world.now_ns)
        with self.consumer(self.places, is_committed=True) as reader:
            ends = reader.end_offsets(self.places)
            for place, start in self.table.starts.items():
                reader.seek(place, start)
            for place, end in ends.items():
                known = max(one.reading.passed.get(place, 0) for one in self.table_readers)
                assert end >= known, f"{place} ends at {end}, and {known} was passed"
            consumers = [reader, *(one.consumer for one in self.table_readers)]
            deadline_ns = world.now_ns + 60 * SECOND
            while any(one.position(p) < ends[p] for one in consumers for p in self.places):
                for record in reader.poll(100):
                    place = TopicPartition(str(record.topic), record.partition)
                    found[place].append(self.table.read(reading, record, is_committed=True))
                for one in self.table_readers:
                    one.pump()
                assert world.now_ns < deadline_ns, (
                    "the table cannot be read to its end: "
                    f"{[(p, [one.position(p) for one in consumers], ends[p]) for p in self.places]}"
                )
        for one in self.table_readers:
            if one.is_committed:
                for place in self.places:
                    one.reading.passed.setdefault(place, 0)
                self.table.check_pass(one.reading, ends, world.now_ns)
        return found


@dataclass(slots=True)
class Merged:
    """Segments that were merged."""

    segments: int = 0


@contextmanager
def stepped_cleaner(rng: random.Random, merged: Merged) -> Iterator[None]:
    """Let the cleaner yield after few batches, with hashes that a seed chooses, and merge segments
    as small as those of a schedule.
    """
    merge = MergingPass._merge

    def counted(self: MergingPass, segment: Any) -> Iterator[int]:
        yield from merge(self, segment)
        merged.segments += 1

    least = TOPIC_SETTINGS["segment.bytes"]._replace(minimum=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TOPIC_SETTINGS, "segment.bytes", least)  # an alteration checks it, too
        patch.setattr(merging_rules, "SEGMENT_MIN_BYTES", 1_000)
        patch.setattr(merging_pass, "STEP_BATCHES", rng.choice((1, 3)))
        patch.setattr(MergingPass, "_merge", counted)
        patch.setattr(cleaner, "STEP_BATCHES", rng.choice((1, 3)))
        patch.setattr(superseded, "KeyOffsets", lambda slots: KeyOffsets(slots, rng.randbytes(16)))
        yield


def run(seed: int, faults: Sequence[str] | None = None) -> CompactionSchedule:
    """One schedule. Raises what it finds, with the seed and what had happened."""
    schedule = CompactionSchedule(seed, faults)
    try:
        schedule.run()
    except BaseException as error:
        error.add_note(
            f"replay with tests.sim.compaction.schedule.run({seed}): {schedule.faults}\n"
            + "\n".join(schedule.log)
        )
        raise
    return schedule
