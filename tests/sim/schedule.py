"""One schedule: a world, clients, faults, all from one seed; then everything is healed, comes to rest, and is checked.

A schedule that fails is replayed by `run(seed)`.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from appliance import topic_settings
from appliance.default_schema import DEFAULT_DELAY_SCHEMA_MESSAGE, DEFAULT_SCHEMA_MESSAGE
from tailrace.admin import Admin
from tailrace.connection import Connection
from tailrace.consumer import Consumer
from tailrace.delays import delay_log_name
from tailrace.errors import CorruptBatchError, LogTruncatedError, OffsetOutOfRangeError, TailraceError
from tailrace.producer import Producer
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import Api
from tailrace.records import Record, RecordMetadata, TopicPartition
from tests.kit.batches import TIME_US
from tests.kit.checker import History, check, value_of
from tests.sim.world import ADDRESS, MS, SECOND, PowerLost, World

TOPIC = "t"
LATER = "later"
HOUR_US = 3_600_000_000


class AllKilled(BaseException):
    """SIGKILL of every process at once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed stands for."""

    steps: int
    workers: int
    data_dirs: int
    partitions: int
    acks: int | str
    durability: str
    producers: int
    consumers: int
    faults: tuple[str, ...]
    fault_rate: float
    log_append_time: bool
    changes_layout: bool
    dedicated: bool
    deletes: bool
    """Whether somebody deletes records, and makes and deletes other topics."""
    delays: bool
    """Whether producers have records of another topic delivered later."""

    @property
    def loses_power(self) -> bool:
        return "power" in self.faults

    @property
    def is_lossless(self) -> bool:
        """Whether nothing acknowledged may be missing."""
        if self.loses_power and (self.acks != "all" or self.durability != "disk"):
            return False
        return "disk error" not in self.faults or (self.acks == "all" and self.durability == "disk")

    @property
    def may_have_holes(self) -> bool:
        """Under durability=memory a segment that was given up after a disk error is not synced: power loss makes a hole of it, which is reported."""
        return self.loses_power and "disk error" in self.faults and self.durability == "memory"

    @property
    def may_refuse(self) -> bool:
        """Whether a producer may be told that a record is lost."""
        return "disk error" in self.faults


FAULTS = ("kill", "kill", "crash point", "stop", "kill all", "power", "cut", "clock", "disk error", "full disk", "restart")


def plan(rng: random.Random) -> Plan:
    faults = tuple(sorted({rng.choice(FAULTS) for _ in range(rng.randint(0, 4))}))
    return Plan(
        steps=rng.randint(200, 500), workers=rng.randint(1, 2), data_dirs=rng.choice((1, 1, 2)), partitions=rng.randint(1, 7),
        acks=rng.choice((1, "all", "all")), durability=rng.choice(("disk", "disk", "memory")), producers=rng.randint(1, 2), consumers=rng.randint(0, 2),
        faults=faults, fault_rate=rng.choice((0.005, 0.01, 0.03)), log_append_time=rng.random() < 0.3, changes_layout=rng.random() < 0.3,
        dedicated=rng.random() < 0.2, deletes=rng.random() < 0.3, delays=rng.random() < 0.4,
    )  # fmt: skip


class Refusal(NamedTuple):
    """A record that was given up."""

    partition: int
    value: bytes
    error: TailraceError


@dataclass(slots=True)
class Delayed:
    """Records that are to be delivered later, to a topic of their own; and what became of them."""

    world: World
    rng: random.Random
    partitions: int
    sent: dict[bytes, int] = field(default_factory=dict)
    """value -> partition"""
    acknowledged: set[bytes] = field(default_factory=set)

    def send(self, producer: Producer, name: str) -> None:
        partition = self.rng.randrange(self.partitions)
        value = b"%b-%d" % (name.encode(), len(self.sent))
        self.sent[value] = partition
        due_us = self.world.clock.wall_us() + self.rng.randrange(0, self.rng.choice((20, 2_000))) * 1000
        due = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=due_us)
        producer.send(LATER, value, partition=partition, timestamp=TIME_US, deliver_at=due, on_delivery=partial(self._on_delivery, value))

    def _on_delivery(self, value: bytes, metadata: RecordMetadata | None, _error: TailraceError | None) -> None:
        if metadata is not None:
            assert metadata.offset is None
            assert metadata.delay_id
            self.acknowledged.add(value)

    def check(self, readable: Mapping[int, Sequence[tuple[int, bytes]]], *, is_lossless: bool) -> None:
        """What came is what was sent; exactly once, unless something acknowledged may be lost."""
        found = [(value, partition) for partition, records in readable.items() for _, value in records]
        for value, partition in found:
            assert self.sent.get(value) == partition, f"{value!r} was not sent to partition {partition}"
        if is_lossless:
            names = [value for value, _ in found]
            assert len(names) == len(set(names)), f"delivered twice: {sorted(name for name in names if names.count(name) > 1)[:4]}"
            assert self.acknowledged <= set(names), f"acknowledged and never delivered: {sorted(self.acknowledged - set(names))[:4]}"


@dataclass(slots=True)
class ProducerActor:
    """A program that sends."""

    name: str
    producer: Producer
    rng: random.Random
    history: History
    partitions: int
    delayed: Delayed | None
    next_number: int = 0
    refusals: list[Refusal] = field(default_factory=list)

    def turn(self) -> None:
        sender = self.producer._sender
        if self.rng.random() < 0.7 and sender.accumulator.unended_count < 12:
            partition = self.rng.randrange(self.partitions)
            for _ in range(self.rng.randint(1, 3)):
                value = value_of(self.name, self.next_number, b"x" * self.rng.randint(0, 60))
                self.next_number += 1
                self.history.send(partition, value)
                on_delivery = partial(self._on_delivery, partition, value)
                self.producer.send(TOPIC, value, partition=partition, timestamp=TIME_US, on_delivery=on_delivery)
            if self.delayed is not None and self.rng.random() < 0.5:
                self.delayed.send(self.producer, self.name)
            if self.rng.random() < 0.5:
                with sender.lock:
                    sender.close_all()
        self.pump()

    def pump(self) -> None:
        sender = self.producer._sender
        with sender.lock:
            sender.pump()
        sender.make_callbacks()

    def _on_delivery(self, partition: int, value: bytes, metadata: RecordMetadata | None, error: TailraceError | None) -> None:
        if metadata is not None:
            assert metadata.offset is not None
            self.history.acknowledge(partition, value, metadata.offset)
        else:
            assert error is not None
            self.refusals.append(Refusal(partition, value, error))

    def next_wake_ns(self, now_ns: int) -> int:
        return self.producer._sender.next_wake_ns(now_ns)

    def has_input(self) -> bool:
        socket: Any = self.producer._sender.connection._socket
        return socket is not None and bool(socket.link.to_client)


@dataclass(slots=True)
class ConsumerActor:
    """A program that follows every partition from the beginning."""

    consumer: Consumer
    history: History
    allows_loss: bool
    allows_holes: bool
    allows_deletion: bool
    positions: dict[int, int] = field(default_factory=dict)
    watermarks: dict[int, int] = field(default_factory=dict)

    def turn(self) -> None:
        try:
            records = self.consumer.poll(0)
        except TailraceError as error:
            self._on_error(error)
            return
        for record in records:
            expected = self.positions.get(record.partition, 0)
            assert record.offset == expected, f"partition {record.partition}: offset {record.offset} came where {expected} belongs"
            self.positions[record.partition] = expected + 1
            assert record.value is not None
            if not self.allows_loss:
                self.history.read(record.partition, record.offset, record.value)
        if not self.allows_loss:
            for key, cursor in self.consumer._reading.cursors.items():
                seen, known = cursor.high_watermark or 0, self.watermarks.get(key.partition, 0)
                assert seen >= known, f"the high watermark of partition {key.partition} went back from {known} to {seen}"
                self.watermarks[key.partition] = seen
                self.history.watermarks[key.partition] = max(seen, self.history.watermarks.get(key.partition, 0))

    def _on_error(self, error: TailraceError) -> None:
        if isinstance(error, LogTruncatedError):
            assert self.allows_loss, f"a reader was told that what it had read is lost: {error}"
            self._go_back(error)
        elif isinstance(error, OffsetOutOfRangeError):
            assert self.allows_loss or self.allows_deletion, f"a reader fell out of a log that had lost nothing: {error}"
            self._restart()
        elif isinstance(error, CorruptBatchError):
            assert self.allows_holes, f"what nobody damaged is damaged: {error}"
            partition, offset = skip(self.consumer, error)
            self.positions[partition] = offset
        else:
            assert error.code in (ErrorCode.STORAGE_ERROR, ErrorCode.NOT_READY, ErrorCode.TIMED_OUT, ErrorCode.NOT_REACHABLE), repr(error)

    def _go_back(self, error: LogTruncatedError) -> None:
        for key in self.consumer.assignment():
            if f"{key.topic}-{key.partition} " in str(error):
                self._seek(key, error.offset or 0)

    def _restart(self) -> None:
        """On from the beginning, which may have moved."""
        try:
            for key, start in self.consumer.beginning_offsets(self.consumer.assignment()).items():
                if self.allows_loss or start > self.positions.get(key.partition, 0):
                    self._seek(key, start)
        except TailraceError:
            pass  # nobody answers now: the next turn falls out again

    def _seek(self, key: TopicPartition, offset: int) -> None:
        self.consumer.seek(key, offset)
        self.positions[key.partition] = offset

    def next_wake_ns(self, now_ns: int) -> int:
        tick_ns = self.consumer._connection.next_tick_ns()
        return now_ns + 50 * MS if tick_ns is None else tick_ns

    def has_input(self) -> bool:
        socket: Any = self.consumer._connection._socket
        return socket is not None and bool(socket.link.to_client)


@dataclass(slots=True)
class AdminActor:
    """Somebody who deletes records, and makes and deletes other topics; asks, and does not wait."""

    connection: Connection
    rng: random.Random
    history: History
    partitions: int

    def turn(self) -> None:
        self.pump()
        if not self.connection.is_ready or self.rng.random() > 0.2:
            return
        choice = self.rng.random()
        if choice < 0.5:
            partition = self.rng.randrange(self.partitions)
            known = [offset for (its_partition, _), offset in self.history.acknowledged.items() if its_partition == partition]
            before = self.rng.randint(0, max(known, default=0))
            body = {"topics": [{"name": TOPIC, "partitions": {str(partition): before}}]}
            self._ask(Api.DELETE_RECORDS, body)
        elif choice < 0.8:
            self._ask(Api.CREATE_TOPICS, {"topics": [{"name": "other", "partitions": self.rng.randint(1, 3), "configs": {}}]})
        else:
            self._ask(Api.DELETE_TOPICS, {"topics": [{"name": "other"}]})

    def _ask(self, api: Api, body: dict[str, Any]) -> None:
        self.connection.request(api, [requests.encode_json(body)], lambda _: None)

    def pump(self) -> None:
        self.connection.process()
        self.connection.tick(self.connection.now_ns())

    def next_wake_ns(self, now_ns: int) -> int:
        tick_ns = self.connection.next_tick_ns()
        return now_ns + SECOND if tick_ns is None else tick_ns

    def has_input(self) -> bool:
        socket: Any = self.connection._socket
        return socket is not None and bool(socket.link.to_client)


class Schedule:
    """One seed's world."""

    def __init__(self, seed: int, wanted: Plan | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.plan = wanted or plan(self.rng)
        self.history = History()
        self.world = World(self.rng, workers=self.plan.workers, data_dirs=self.plan.data_dirs)
        if seed % 2:
            self.world.preempts = random.Random(f"preemptions of {seed}")
        self.actors: list[ProducerActor | ConsumerActor | AdminActor] = []
        self.delayed: Delayed | None = None
        self.log: list[str] = []
        """What the fates did, for whoever looks into a failure."""

    def run(self) -> int:
        """Answers how many records there were in the end. Raises AssertionError."""
        world = self.world
        try:
            with world.interruptible():
                self._set_up()
                self._guarded(self._disturb)
                self._heal()
                return self._check()
        finally:
            for actor in self.actors:
                if isinstance(actor, ProducerActor):
                    actor.producer._sender.closed = True
                    os.close(actor.producer._sender._wake_fd)
                    os.close(actor.producer._sender._driver_fd)
            world.close()

    @property
    def producers(self) -> list[ProducerActor]:
        return [actor for actor in self.actors if isinstance(actor, ProducerActor)]

    # ---- phases ----------------------------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        world, plan = self.world, self.plan
        catalog = world.open_catalog()
        catalog.register_dirs([(path, path) for path in world.data_dirs])
        # Straight into the catalog: users may not set segments as small as this.
        given: dict[str, Any] = {"durability": plan.durability, "segment.bytes": 4000}
        if plan.log_append_time:
            given["message.timestamp.type"] = "LogAppendTime"
        if plan.dedicated:
            given["worker.dedicated"] = True
        world.changes_layout = plan.changes_layout
        catalog.create_topic(TOPIC, plan.partitions, given, DEFAULT_SCHEMA_MESSAGE, False, TIME_US)
        if plan.delays:
            given = {"durability": plan.durability, "segment.bytes": 4000, "delay.enabled": True}
            later = catalog.create_topic(LATER, min(2, plan.partitions), given, DEFAULT_SCHEMA_MESSAGE, False, TIME_US)
            own = {**topic_settings.delay_log_settings(given), "segment.bytes": 4000}
            catalog.create_topic(
                delay_log_name(LATER), len(later.partitions), own, DEFAULT_DELAY_SCHEMA_MESSAGE, False, TIME_US, later.topic_id
            )
        catalog.close()
        world.boot()
        world.settle_servers()
        self.delayed = Delayed(world, self.rng, min(2, plan.partitions)) if plan.delays else None
        for number in range(plan.producers):
            producer = Producer(
                ADDRESS, environment=world.environment, acks=plan.acks, linger_ms=self.rng.choice((0, 5)), compression_type="none",
                request_timeout_ms=3000, delivery_timeout_ms=3_600_000, retry_backoff_ms=20,
            )  # fmt: skip
            self.actors.append(ProducerActor(f"p{number}", producer, self.rng, self.history, plan.partitions, self.delayed))
            producer.partitions_for(TOPIC)
            if plan.delays:
                producer.partitions_for(LATER)
        self.actors += [
            ConsumerActor(self._consumer(), self.history, not plan.is_lossless, plan.may_have_holes, plan.deletes)
            for _ in range(plan.consumers)
        ]

    def _consumer(self, topic: str = TOPIC) -> Consumer:
        consumer = Consumer(
            topic, bootstrap=ADDRESS, environment=self.world.environment, auto_offset_reset="none", fetch_max_wait_ms=100, fetch_max_bytes=1 << 15,
        )  # fmt: skip
        for key in consumer.assignment():
            consumer.seek(key, 0)
        return consumer

    def _guarded(self, act: Callable[[], None]) -> None:
        """Until `act` ends by itself: whoever pulls the plug in the midst of it makes it begin again."""
        while True:
            try:
                act()
                return
            except PowerLost:
                self.log.append(f"{self.world.steps}: power lost")
                self.world.lose_power()
            except AllKilled:
                self.log.append(f"{self.world.steps}: all killed")
                self.world.kill_all()

    def _disturb(self) -> None:
        while self.world.steps < self.plan.steps:
            if self.plan.faults and self.rng.random() < self.plan.fault_rate:
                self._fault(self.rng.choice(self.plan.faults))
            self._step()

    def _step(self) -> None:
        """One turn of somebody who can do something."""
        world = self.world
        world.now_ns += self.rng.randrange(1_000, 100_000)
        if self.rng.random() < 0.3:
            self.rng.choice(self.actors).turn()
            return
        runnable = [child for child in world.children if world.is_runnable(child)]
        if runnable:
            world.step(self.rng.choice(runnable))
        else:
            self.rng.choice(self.actors).turn()
            if self.rng.random() < 0.2:
                world.pass_time(world.now_ns + self.rng.randrange(1, 200) * MS)

    def _fault(self, fault: str) -> None:
        world, rng = self.world, self.rng
        self.log.append(f"{world.steps}: {fault}")
        living = [child for child in world.children if child.agent is not None]
        if fault == "kill":
            world.doom(rng.randint(0, 40))
        elif fault == "crash point":
            world.crash_at_a_point()
        elif fault == "stop" and living:
            rng.choice(living).stopped_until_ns = world.now_ns + rng.randrange(1, 3000) * MS
        elif fault == "kill all":
            world.doom(rng.randint(0, 60), AllKilled)
        elif fault == "power":
            world.doom(rng.randint(0, 60), PowerLost)
        elif fault == "cut" and world.network.links:
            world.network.cut(rng.choice(list(world.network.links.values())))
        elif fault == "clock":
            world.wall_offset_us += rng.choice((-1, 1)) * HOUR_US
        elif fault == "disk error":
            self.break_disk()
        elif fault == "full disk":
            world.disk.free = 0 if world.disk.free else 1 << 40
        elif fault == "restart":
            world.stop_cleanly()

    def break_disk(self) -> None:
        """The next change of one data directory fails."""
        world = self.world
        broken = self.rng.choice(world.data_dirs)
        left = self.rng.randint(1, 3)

        def hook(operation: str, path: str) -> None:
            nonlocal left
            world.count_down()
            if left and path.startswith(broken + "/") and operation in ("write", "sync"):
                left -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        world.disk.hook = hook

    def _heal(self) -> None:
        """No more faults: everything that was sent must end well, and everybody come to rest."""
        world = self.world
        world.heal()
        deadline_ns = world.now_ns + 600 * SECOND
        producers = self.producers
        for actor in producers:
            with actor.producer._sender.lock:
                actor.producer._sender.close_all()
        while any(actor.producer._sender.accumulator.unended_count for actor in producers):
            assert world.now_ns < deadline_ns, "batches do not end: " + "; ".join(
                f"{actor.name}: {batch.state.name} {batch.last_refusal}" for actor in producers for queue in actor.producer._sender.accumulator.queues.values()
                for batch in queue.batches()
            )  # fmt: skip
            self._quiet_step()
        world.settle_servers()
        if "disk error" in self.plan.faults:  # the operator has seen to the disk
            with Admin(ADDRESS, environment=world.environment) as admin:
                admin.bring_online(TOPIC)
                if self.delayed is not None:
                    admin.bring_online(LATER)
        if self.delayed is not None:
            self._await_deliveries(deadline_ns)

    def _await_deliveries(self, deadline_ns: int) -> None:
        """Until the scheduler has nothing left that is due within reach: the clock may have been set, by hours."""
        world = self.world
        with Admin(ADDRESS, environment=world.environment) as admin:
            while True:
                world.settle_servers()
                waiting = admin.describe_delays()
                if all(partition["pending"] == 0 and partition["is_settled"] for partition in waiting):
                    return
                assert world.now_ns < deadline_ns + 86_400 * SECOND, f"what was delayed does not come: {waiting}"
                due = [partition["next_due_us"] - world.clock.wall_us() for partition in waiting if partition["next_due_us"] is not None]
                world.pass_time(world.now_ns + max(10 * MS, min(due, default=0) * 1000))

    def _quiet_step(self) -> None:
        """Somebody who can do something, else on to the next deadline: a wake-up that nobody gives is a hang that shows."""
        world = self.world
        runnable = [child for child in world.children if world.is_runnable(child)]
        ready = [actor for actor in self.actors if actor.has_input() or actor.next_wake_ns(world.now_ns) <= world.now_ns]
        world.now_ns += 10_000
        if runnable and (not ready or self.rng.random() < 0.6):
            world.step(self.rng.choice(runnable))
        elif ready:
            actor = self.rng.choice(ready)
            actor.turn() if isinstance(actor, ConsumerActor) else actor.pump()
        else:
            for actor in self.actors:
                actor.turn() if isinstance(actor, ConsumerActor) else actor.pump()
            world.pass_time(min(actor.next_wake_ns(world.now_ns) for actor in self.actors))

    # ---- the end ---------------------------------------------------------------------------------------------------------------------

    def _check(self) -> int:
        plan = self.plan
        refusals = [refusal for actor in self.producers for refusal in actor.refusals]
        assert plan.may_refuse or not refusals, f"records were refused: {refusals[:3]}"
        readable: dict[int, list[tuple[int, bytes]]] = {p: [] for p in range(plan.partitions)}
        with self._consumer() as reader:
            ends = reader.end_offsets(reader.assignment())
            starts = reader.beginning_offsets(reader.assignment())
            assert plan.deletes or not plan.is_lossless or not any(starts.values()), f"the beginning is gone: {starts}"
            for key, start in starts.items():
                reader.seek(key, start)
            waited = 0
            appended_us: dict[int, int] = {}
            while any(self._position(reader, key) < ends[key] for key in ends):
                for record in self._poll(reader):
                    assert record.value is not None
                    readable[record.partition].append((record.offset, record.value))
                    if plan.log_append_time:
                        assert record.timestamp >= appended_us.get(record.partition, 0), f"the time of appending went back at {record}"
                        appended_us[record.partition] = record.timestamp
                    waited = 0
                waited += 1
                assert waited < 200, f"the log cannot be read to its end: {[(key, reader.position(key), ends[key]) for key in ends]}"
        if self.delayed is not None:
            self.delayed.check(self._read_delayed(), is_lossless=plan.is_lossless)
        return check(
            self.history,
            readable,
            lossless=plan.is_lossless,
            dense=not plan.may_have_holes,
            starts={key.partition: start for key, start in starts.items()},
        )

    def _read_delayed(self) -> dict[int, list[tuple[int, bytes]]]:
        readable: dict[int, list[tuple[int, bytes]]] = {}
        with self._consumer(LATER) as reader:
            ends = reader.end_offsets(reader.assignment())
            for key, start in reader.beginning_offsets(reader.assignment()).items():
                reader.seek(key, start)
            waited = 0
            while any(self._position(reader, key) < ends[key] for key in ends):
                for record in self._poll(reader):
                    assert record.value is not None
                    readable.setdefault(record.partition, []).append((record.offset, record.value))
                    waited = 0
                waited += 1
                assert waited < 200, f"{LATER} cannot be read to its end"
        return readable

    def _poll(self, reader: Consumer) -> list[Record]:
        try:
            return reader.poll(100)
        except CorruptBatchError as error:
            if not self.plan.may_have_holes:
                raise
            skip(reader, error)
            return []

    def _position(self, reader: Consumer, key: TopicPartition) -> int:
        try:
            return reader.position(key)
        except CorruptBatchError as error:
            if not self.plan.may_have_holes:
                raise
            return skip(reader, error)[1]


def skip(consumer: Consumer, error: CorruptBatchError) -> tuple[int, int]:
    """As the message says. Answers partition and offset."""
    assert error.key is not None
    assert error.next_offset is not None
    consumer.seek(error.key, error.next_offset)
    return error.key.partition, error.next_offset


def run(seed: int) -> Schedule:
    """One schedule. Raises what it finds, with the seed and what had happened."""
    schedule = Schedule(seed)
    try:
        schedule.run()
    except BaseException as error:
        error.add_note(f"replay with tests.sim.schedule.run({seed}): {schedule.plan}\n" + "\n".join(schedule.log))
        raise
    return schedule
