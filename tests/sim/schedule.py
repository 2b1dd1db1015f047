"""One schedule: a world, clients, faults, all from one seed; then everything is healed, comes to
rest, and is checked.

A schedule that fails is replayed by `run(seed)`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

from appliance.config import topic_config
from appliance.config.default_schema import DEFAULT_DELAY_SCHEMA_MESSAGE, DEFAULT_SCHEMA_MESSAGE
from shm.memory.layout import Role
from tailrace.admin.admin import Admin
from tailrace.consumer.consumer import Consumer
from tailrace.core.errors import CorruptBatchError
from tailrace.core.records import Record
from tailrace.core.schedule.delays import delay_log_name
from tailrace.core.topic_partition import TopicPartition
from tailrace.producer.producer import Producer
from tailrace.producer.sending.sender_thread import SenderThread
from tailrace.protocol import produce_messages
from tests.kit.batches import TIME_US
from tests.kit.checker import History, check
from tests.sim.actors import LATER, TOPIC, AdminActor, ConsumerActor, Delayed, ProducerActor, skip
from tests.sim.faults import AllKilled, cause
from tests.sim.machine.machine_parts import ADDRESS, MS, SECOND, PowerLost
from tests.sim.machine.world import World
from tests.sim.members.group_members import MemberActor, are_settled, committed, members
from tests.sim.members.share_history import QueueHistory
from tests.sim.members.share_members import ShareActor, partitions_of_queue, share_members
from tests.sim.members.share_members import settings as queue_settings
from tests.sim.plan import Plan, plan
from tests.sim.raw_producers import RawProducerActor, raw_producer

QUEUE_RATE = 0.3
QUEUE_FAULT_RATE = 0.06
RAW_RATE = 0.5
"""Part of the schedules that have a producer which sends requests of many batches past the SDK."""


class Schedule:
    """One seed's world."""

    def __init__(self, seed: int, requested: Plan | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.plan = requested or plan(self.rng)
        self.history = History()
        self.world = World(self.rng, workers=self.plan.workers, data_dirs=self.plan.data_dirs)
        if seed % 2:
            self.world.preempts = random.Random(f"preemptions of {seed}")
        self.groups_rng = random.Random(f"groups of {seed}")
        """A generator of its own: a schedule without groups goes as it would if there were none."""
        self.members: list[MemberActor] = []
        self.queue_rng = random.Random(f"share of {seed}")
        self.workers: list[ShareActor] = []
        """Members of a share group."""
        self.raw_rng = random.Random(f"raw of {seed}")
        self.raw: RawProducerActor | None = None
        self.actors: list[
            ProducerActor | ConsumerActor | AdminActor | MemberActor | ShareActor | RawProducerActor
        ] = []
        self.delayed: Delayed | None = None
        self.losses_ns: list[int] = []
        """Times of power failures."""
        self.log: list[str] = []
        """Lines about the fates, for the analysis of a failure."""

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
                    abandon(actor.producer._sender_thread)
            world.close()

    @property
    def producers(self) -> list[ProducerActor]:
        return [actor for actor in self.actors if isinstance(actor, ProducerActor)]

    # ---- phases ----------------------------------------------------------------------------------

    def _set_up(self) -> None:
        world, plan = self.world, self.plan
        queue_given = queue_settings(self.queue_rng) if self.queue_rng.random() < QUEUE_RATE else {}
        world.changes_layout = plan.changes_layout
        self._make_topics(queue_given)
        world.boot()
        world.settle_servers()
        self.delayed = Delayed(world, self.rng, min(2, plan.partitions)) if plan.delays else None
        self._add_producers()
        self.actors += [
            ConsumerActor(
                self._consumer(), self.history, not plan.is_lossless, plan.may_have_holes,
                plan.deletes,
            )
            for _ in range(plan.consumers)
        ]  # fmt: skip
        self._add_groups_and_queues(queue_given)

    def _make_topics(self, queue_given: dict[str, Any]) -> None:
        world, plan = self.world, self.plan
        catalog = world.open_catalog()
        catalog.slots.register([(path, path) for path in world.data_dirs])
        # Straight into the catalog: users may not set segments as small as this.
        given: dict[str, Any] = {"durability": plan.durability, "segment.bytes": 4000}
        if plan.log_append_time:
            given["message.timestamp.type"] = "LogAppendTime"
        if plan.dedicated:
            given["worker.dedicated"] = True
        given |= queue_given
        catalog.create_topic(TOPIC, plan.partitions, given, DEFAULT_SCHEMA_MESSAGE, False, TIME_US)
        if plan.delays:
            given = {"durability": plan.durability, "segment.bytes": 4000, "delay.enabled": True}
            later = catalog.create_topic(
                LATER, min(2, plan.partitions), given, DEFAULT_SCHEMA_MESSAGE, False, TIME_US
            )
            own = {**topic_config.delay_log_settings(given), "segment.bytes": 4000}
            catalog.create_topic(
                delay_log_name(LATER),
                len(later.partitions),
                own,
                DEFAULT_DELAY_SCHEMA_MESSAGE,
                False,
                TIME_US,
                later.topic_id,
            )
        catalog.close()

    def _add_producers(self) -> None:
        world, plan = self.world, self.plan
        for number in range(plan.producers):
            producer = Producer(
                ADDRESS, runtime=world.runtime, acks=plan.acks, linger_ms=self.rng.choice((0, 5)),
                compression_type="none",
                request_timeout_ms=3000, delivery_timeout_ms=3_600_000, retry_backoff_ms=20,
            )  # fmt: skip
            self.actors.append(
                ProducerActor(
                    f"p{number}", producer, self.rng, self.history, plan.partitions, self.delayed
                )
            )
            producer.partitions_for(TOPIC)
            if plan.delays:
                producer.partitions_for(LATER)

    def _add_groups_and_queues(self, queue_given: dict[str, Any]) -> None:
        world, plan = self.world, self.plan
        if self.groups_rng.random() < 0.4:
            self.members = members(world, self.groups_rng, plan.partitions)
            self.actors += self.members
        if self.raw_rng.random() < RAW_RATE:
            acks = produce_messages.ACKS_ALL if plan.acks == "all" else 1
            may_lose = plan.may_refuse or not plan.is_lossless or plan.deletes
            self.raw = raw_producer(world, self.raw_rng, self.history, acks, may_lose)
            self.actors.append(self.raw)
        if queue_given:
            limit = queue_given["group.share.delivery.count.limit"]
            queue = QueueHistory(
                plan.partitions, limit, may_lose=not plan.is_lossless, may_delete=plan.deletes
            )
            self.workers = share_members(world, self.queue_rng, queue)
            self.actors += self.workers

    def _consumer(self, topic: str = TOPIC) -> Consumer:
        # Answers of a few batches: they are filled, and what follows them is read ahead.
        consumer = Consumer(
            topic, bootstrap=ADDRESS, runtime=self.world.runtime, auto_offset_reset="none",
            fetch_max_wait_ms=100, fetch_max_bytes=1 << 11,
        )  # fmt: skip
        for key in consumer.assignment():
            consumer.seek(key, 0)
        return consumer

    def _guarded(self, act: Callable[[], None]) -> None:
        """Until `act` ends by itself: whoever pulls the plug in the midst of it makes it begin
        again.
        """
        while True:
            try:
                act()
                return
            except PowerLost:
                self.log.append(f"{self.world.steps}: power lost")
                self.losses_ns.append(self.world.now_ns)
                self.world.lose_power()
            except AllKilled:
                self.log.append(f"{self.world.steps}: all killed")
                self.world.kill_all()

    def _disturb(self) -> None:
        while self.world.steps < self.plan.steps:
            if self.plan.faults and self.rng.random() < self.plan.fault_rate:
                self._fault(self.rng.choice(self.plan.faults))
            if self.workers and self.queue_rng.random() < QUEUE_FAULT_RATE:
                self._queue_fault()
            self._step()

    def _queue_fault(self) -> None:
        """Make a fault of queues: locks pass, or the process that keeps them dies."""
        world, rng = self.world, self.queue_rng
        groups = next(
            (
                child
                for child in world.children
                if child.role is Role.GROUPS and child.agent is not None
            ),
            None,
        )
        if (
            groups is not None
            and rng.random() < 0.5
            and {"kill", "kill all", "crash point"} & set(self.plan.faults)
        ):
            self.log.append(f"{world.steps}: groups killed")
            if world.is_runnable(groups):
                world.fate.doom(rng.randint(0, 25))
                world.step(groups)
                world.fate.pardon()
            if groups.agent is not None:
                world.bury(groups)
        else:
            world.now_ns += rng.randrange(1, 300) * MS

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
        self.log.append(f"{self.world.steps}: {fault}")
        if fault == "full disk":
            self.world.disk.free = 0 if self.world.disk.free else 1 << 40
        else:
            cause(fault, self.world, self.rng)

    def _heal(self) -> None:
        """No more faults: everything that was sent must end well, and everybody come to rest."""
        world = self.world
        world.heal()
        deadline_ns = world.now_ns + 600 * SECOND
        producers = self.producers
        for actor in producers:
            with actor.producer._sender_thread.lock:
                actor.producer._sender_thread.close_all()
        while any(
            actor.producer._sender_thread.accumulator.incomplete_count for actor in producers
        ):
            assert world.now_ns < deadline_ns, "batches do not end: " + "; ".join(
                f"{actor.name}: {batch.state.name} {batch.last_refusal}" for actor in producers
                for queue in actor.producer._sender_thread.accumulator.queues.values() for batch in queue.batches()  # noqa: E501
            )  # fmt: skip
            self._quiet_step()
        while self.raw is not None and self.raw.incomplete_count:
            assert world.now_ns < deadline_ns, f"requests past the SDK do not end: {self.raw.lanes}"
            self._quiet_step()
        world.settle_servers()
        if "disk error" in self.plan.faults:  # the operator has seen to the disk
            with Admin(ADDRESS, runtime=world.runtime) as admin:
                admin.bring_online(TOPIC)
                if self.delayed is not None:
                    admin.bring_online(LATER)
        if self.delayed is not None:
            self._await_deliveries(deadline_ns)
        if self.members:
            self._await_members(world.now_ns + 600 * SECOND)
            self.members[0].history.check(committed(world))
        if self.workers:
            self._await_queue(world.now_ns + 600 * SECOND)

    def _await_members(self, deadline_ns: int) -> None:
        """Until every partition has one owner in the group."""
        while not are_settled(self.members):
            assert self.world.now_ns < deadline_ns, "the group does not come to rest: " + "; ".join(
                f"{actor.name}: epoch={actor.epoch} owned={actor.partitions} asks={actor.is_asking}"
                for actor in self.members
            )
            self._quiet_step()

    def _await_queue(self, deadline_ns: int) -> None:
        """Until all that is in the log was accepted, rejected or is a dead letter; that stays so
        when the process of groups is killed.
        """
        world = self.world
        for actor in self.workers:
            actor.is_calm = True
        while not is_done(rows := partitions_of_queue(world), self.plan.partitions):
            assert world.now_ns < deadline_ns, (
                f"the queue does not come to its end: {rows}; "
                + "; ".join(
                    f"{actor.name}: epoch={actor.epoch} held={len(actor.held)} under={actor.under}"
                    for actor in self.workers
                )
            )
            for _ in range(50):
                self._quiet_step()
        queue = self.workers[0].history
        rest_ns = world.now_ns
        while any(
            actor.last_request_ns < rest_ns for actor in self.workers
        ):  # then no suspicion is left open
            assert world.now_ns < deadline_ns, "a member of the queue is not heard any more"
            self._quiet_step()
        queue.check(
            {p: row["beginning"] for p, row in rows.items()},
            {p: row["end"] for p, row in rows.items()},
        )
        world.bury(next(child for child in world.children if child.role is Role.GROUPS))
        world.settle_servers()
        assert is_done(partitions_of_queue(world), self.plan.partitions), (
            "what was done with is not, for the next process of groups"
        )

    def _await_deliveries(self, deadline_ns: int) -> None:
        """Until the scheduler has nothing left that is due within reach: the clock may have been
        set, by hours.
        """
        world = self.world
        with Admin(ADDRESS, runtime=world.runtime) as admin:
            while True:
                world.settle_servers()
                waiting = admin.describe_delays()
                if all(
                    partition["pending"] == 0 and partition["is_settled"] for partition in waiting
                ):
                    return
                assert world.now_ns < deadline_ns + 86_400 * SECOND, (
                    f"what was delayed does not come: {waiting}"
                )
                due = [
                    partition["next_due_us"] - world.clock.wall_us()
                    for partition in waiting
                    if partition["next_due_us"] is not None
                ]
                world.pass_time(world.now_ns + max(10 * MS, min(due, default=0) * 1000))

    def _quiet_step(self) -> None:
        """Somebody who can do something, else on to the next deadline: a wake-up that nobody gives
        is a hang that shows.
        """
        world = self.world
        runnable = [child for child in world.children if world.is_runnable(child)]
        ready = [
            actor
            for actor in self.actors
            if actor.has_input() or actor.next_wake_ns(world.now_ns) <= world.now_ns
        ]
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

    # ---- the end ---------------------------------------------------------------------------------

    def _check(self) -> int:
        plan = self.plan
        refusals = [refusal for actor in self.producers for refusal in actor.refusals]
        assert plan.may_refuse or not refusals, f"records were refused: {refusals[:3]}"
        readable: dict[int, list[tuple[int, bytes]]] = {p: [] for p in range(plan.partitions)}
        with self._consumer() as reader:
            ends = reader.end_offsets(reader.assignment())
            starts = reader.beginning_offsets(reader.assignment())
            assert plan.deletes or not plan.is_lossless or not any(starts.values()), (
                f"the beginning is gone: {starts}"
            )
            for key, start in starts.items():
                reader.seek(key, start)
            waited = 0
            appended_us: dict[int, int] = {}
            while any(self._position(reader, key) < ends[key] for key in ends):
                for record in self._poll(reader):
                    assert record.value is not None
                    readable[record.partition].append((record.offset, record.value))
                    if plan.log_append_time:
                        assert record.timestamp >= appended_us.get(record.partition, 0), (
                            f"the time of appending went back at {record}"
                        )
                        appended_us[record.partition] = record.timestamp
                    waited = 0
                waited += 1
                assert waited < 200, (
                    "the log cannot be read to its end: "
                    f"{[(key, reader.position(key), ends[key]) for key in ends]}"
                )
        if self.delayed is not None:
            self.delayed.check(self._read_delayed(), is_lossless=plan.is_lossless)
        if self.workers and "disk error" not in plan.faults:
            senders: list[ProducerActor | RawProducerActor] = [
                *self.producers,
                *([self.raw] if self.raw is not None else []),
            ]
            sent_ns = {
                value: sent_ns for actor in senders for value, sent_ns in actor.sent_ns.items()
            }
            self.workers[0].history.check_losses(readable, sent_ns, self.losses_ns)
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


def abandon(sender: SenderThread) -> None:
    """Close what a producer of a schedule that is over has open. It can still be asked to wake its
    thread: by then, its numbers may mean other files.
    """
    sender.closed = sender.is_stopped = True
    fds, sender._driver_fd = [sender._driver_fd, *sender.helper.detach()], -1
    for fd in fds:
        os.close(fd)


def is_done(rows: dict[int, dict[str, Any]], partitions: int) -> bool:
    """True if a queue has nothing left: `rows` of `partitions_of_queue`."""
    return len(rows) == partitions and all(
        row["end"] is not None and row["start_offset"] == row["end"] for row in rows.values()
    )


def run(seed: int) -> Schedule:
    """One schedule. Raises what it finds, with the seed and what had happened."""
    schedule = Schedule(seed)
    try:
        schedule.run()
    except BaseException as error:
        error.add_note(
            f"replay with tests.sim.schedule.run({seed}): {schedule.plan}\n"
            + "\n".join(schedule.log)
        )
        raise
    return schedule
