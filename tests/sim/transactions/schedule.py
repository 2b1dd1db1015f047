"""One schedule of transactions: a world, transactional programs, readers of both levels, faults,
all from one seed; then everything is healed, comes to rest, and is checked.

A schedule that fails is replayed by `run(seed)`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from appliance.config.default_schema import DEFAULT_SCHEMA_MESSAGE
from shm.memory.layout import Role
from tailrace.admin.admin import Admin
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_json_now
from tailrace.consumer.consumer import Consumer
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.frame import Api
from tests.kit.batches import TIME_US
from tests.kit.transactional.transaction_checker import Read, TransactionHistory, check_transformed
from tests.sim.faults import AllKilled, cause
from tests.sim.machine.machine_parts import ADDRESS, MS, SECOND, PowerLost
from tests.sim.machine.world import World
from tests.sim.transactions.programs import Common, Program
from tests.sim.transactions.sdk_programs import SdkProgram

WRITTEN, MADE = "written", "made"
FAULTS = (
    "kill", "kill", "kill groups", "kill groups", "crash point", "stop", "kill all", "power",
    "cut", "cut", "clock", "late", "restart", "disk error", "slow disk",
)  # fmt: skip
LOSSY = frozenset({"power", "power with a slow disk", "disk error"})
"""Faults that may take what a topic with durability=memory has acknowledged."""
QUIET = frozenset({
    ErrorCode.NOT_READY, ErrorCode.TIMED_OUT, ErrorCode.NOT_REACHABLE, ErrorCode.STORAGE_ERROR,
})  # fmt: skip


class Reader:
    """Somebody who reads all the time."""

    def __init__(self, name: str, schedule: TransactionSchedule, *, is_committed: bool) -> None:
        self.name = name
        self.is_committed = is_committed
        self._history = schedule.history
        self._consumer = schedule.consumer(schedule.places, is_committed=is_committed)

    def turn(self) -> None:
        try:
            records = self._consumer.poll(0)
        except TailraceError as error:
            if error.code not in QUIET:
                raise
            return
        for record in records:
            assert record.value is not None
            place = TopicPartition(str(record.topic), record.partition)
            self._history.read(
                self.name, place, record.offset, record.value, is_committed=self.is_committed
            )

    pump = turn

    def next_wake_ns(self, now_ns: int) -> int:
        tick_ns = self._consumer._connection.next_tick_ns()
        return now_ns + 50 * MS if tick_ns is None else tick_ns

    def is_ready(self, now_ns: int) -> bool:
        """True if it has something to do."""
        socket: Any = self._consumer._connection._socket
        has_input = socket is not None and bool(socket.link.to_client)
        return has_input or self.next_wake_ns(now_ns) <= now_ns


class TransactionSchedule:
    """One seed's world."""

    TOPICS: Sequence[str] = (WRITTEN, MADE)

    def __init__(self, seed: int, faults: Sequence[str] | None = None) -> None:
        """`faults`: those that happen; None: a choice of the seed's."""
        rng = self.rng = random.Random(f"transactions {seed}")
        self.history = TransactionHistory()
        self.members_rng = random.Random(f"members of {seed}") if seed % 5 == 4 else None
        """Generator of the schedules in which transformers are members of a group."""
        self.steps = rng.randint(400, 900)
        self.fault_rate = rng.choice((0.005, 0.01, 0.03))
        self.faults = sorted({rng.choice(FAULTS) for _ in range(rng.randint(1, 5))})
        if faults is not None:
            self.faults = list(faults)
            self.fault_rate = 0.03
        self.sdk_rng = random.Random(f"sdk of {seed}") if seed % 7 == 3 else None
        """Generator of the schedules with a program over the SDK, which would warn of
        durability=memory.
        """
        needs_disk = LOSSY & {*self.faults} or self.sdk_rng is not None
        is_in_memory = random.Random(f"durability of {seed}").random() < 0.3
        self.durability = "memory" if is_in_memory and not needs_disk else "disk"
        self.world = World(rng, workers=rng.randint(1, 2), data_dirs=rng.choice((1, 1, 2)))
        if seed % 2:
            self.world.preempts = random.Random(f"preemptions of {seed}")
        partitions = rng.randint(1, 3)
        if self.members_rng is not None:  # members take longer to begin
            self.steps, partitions = 2 * self.steps, 1
        self.written = [TopicPartition(WRITTEN, p) for p in range(partitions)]
        self.made = [TopicPartition(MADE, p) for p in range(2)]
        self.places = [*self.written, *self.made]
        self.programs: list[Program] = []
        self.sdk_programs: list[SdkProgram] = []
        self.readers: list[Reader] = []
        self.log: list[str] = []
        """Lines about the fates, for the analysis of a failure."""

    @property
    def all_programs(self) -> list[Program | SdkProgram]:
        return [*self.programs, *self.sdk_programs]

    @property
    def actors(self) -> list[Program | SdkProgram | Reader]:
        return [*self.all_programs, *self.readers]

    def run(self) -> None:
        """Raises AssertionError."""
        world = self.world
        try:
            with world.interruptible():
                self._set_up()
                self._guarded(self._disturb)
                self._heal()
                self._check()
        finally:
            for program in self.sdk_programs:
                program.close()
            world.close()

    def _set_up(self) -> None:
        world, rng = self.world, self.rng
        catalog = world.open_catalog()
        catalog.slots.register([(path, path) for path in world.data_dirs])
        for name, places in ((WRITTEN, self.written), (MADE, self.made)):
            given: dict[str, Any] = {"segment.bytes": 4000, "durability": self.durability}
            catalog.create_topic(name, len(places), given, DEFAULT_SCHEMA_MESSAGE, False, TIME_US)
        catalog.close()
        world.boot()
        world.settle_servers()
        with Admin(ADDRESS, runtime=world.runtime) as admin:
            topics = admin.topic_info([WRITTEN, MADE])
        common = Common(world, rng, self.history, topics)
        has_members = self.members_rng is not None
        for number in range(1 if has_members else rng.randint(1, 3)):
            timeout_ms = rng.choice((500, 5_000, 60_000))
            self.programs.append(Program(f"w{number}", common, self.written, timeout_ms))
        if has_members:  # two that share a group, and one partition
            for name in ("m0", "m1"):
                self._add_transformer(common, name, self.written[0], self.members_rng)
        else:
            for number in range(rng.randint(0, min(2, len(self.written)))):
                self._add_transformer(common, f"x{number}", self.written[number])
        if self.sdk_rng is not None:
            self.sdk_programs.append(
                SdkProgram("sdk", world, self.sdk_rng, self.history, self.written)
            )
        self.readers = [
            Reader("committed", self, is_committed=True),
            Reader("uncommitted", self, is_committed=False),
        ]

    def _add_transformer(
        self, common: Common, name: str, source: TopicPartition,
        members_rng: random.Random | None = None,
    ) -> None:  # fmt: skip
        timeout_ms = 60_000 if members_rng is not None else self.rng.choice((500, 60_000))
        consumer = self.consumer([source], is_committed=True)
        group = name if members_rng is None else "members"
        self.programs.append(
            Program(name, common, self.made, timeout_ms, source, consumer, group, members_rng)
        )

    def consumer(self, places: list[TopicPartition], *, is_committed: bool) -> Consumer:
        consumer = Consumer(
            bootstrap=ADDRESS, runtime=self.world.runtime, auto_offset_reset="none",
            fetch_max_wait_ms=100, fetch_max_bytes=1 << 11,
            isolation_level="read_committed" if is_committed else "read_uncommitted",
        )  # fmt: skip
        consumer.assign(places)
        for place in places:
            consumer.seek(place, 0)
        return consumer

    # ---- faults ----------------------------------------------------------------------------------

    def _guarded(self, act: Callable[[], None]) -> None:
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
        world, rng = self.world, self.rng
        while world.steps < self.steps:
            if rng.random() < self.fault_rate:
                self._fault(rng.choice(self.faults))
            world.now_ns += rng.randrange(1_000, 100_000)
            if self.members_rng is not None and self.members_rng.random() < 0.02:
                world.now_ns += self.members_rng.randrange(1, 1_000) * MS  # sessions end
            if self.members_rng is not None and self.members_rng.random() < 0.3:
                members = [one for one in self.programs if one.members_rng is not None]
                self.members_rng.choice(members).turn()
            if rng.random() < 0.3:
                rng.choice(self.actors).turn()
                continue
            runnable = [child for child in world.children if world.is_runnable(child)]
            if runnable:
                world.step(rng.choice(runnable))
            else:
                rng.choice(self.actors).turn()
                if rng.random() < 0.2:
                    world.pass_time(world.now_ns + rng.randrange(1, 200) * MS)

    def _fault(self, fault: str) -> None:
        world, rng = self.world, self.rng
        self.log.append(f"{world.steps}: {fault}")
        living = [child for child in world.children if child.agent is not None]
        if fault == "kill groups":
            for child in [one for one in living if one.role is Role.GROUPS]:
                world.fate.doom(rng.randint(0, 12))
                for _ in range(8):
                    if child.agent is not None and world.is_runnable(child):
                        world.step(child)
                world.fate.pardon()
        elif fault == "late":
            world.now_ns += rng.randrange(1, 1_500) * MS
        elif fault == "slow disk":
            for child in [one for one in living if one.role is Role.FLUSHER]:
                child.stopped_until_ns = world.now_ns + rng.randrange(1, 3000) * MS
        elif fault == "power with a slow disk":
            self._fault("slow disk")
            world.fate.doom(rng.randint(60, 400), PowerLost)
        elif fault == "kill worker":
            for child in [one for one in living if one.role is Role.WORKER]:
                world.fate.doom(0)
                if child.agent is not None and world.is_runnable(child):
                    world.step(child)
                world.fate.pardon()
        else:
            cause(fault, world, rng)

    # ---- the end ---------------------------------------------------------------------------------

    def _heal(self) -> None:
        world = self.world
        world.heal()
        if "disk error" in self.faults:  # the operator has seen to the disk
            world.settle_servers()
            with Admin(ADDRESS, runtime=world.runtime) as admin:
                for name in self.TOPICS:
                    admin.bring_online(name)
        deadline_ns = world.now_ns + 120 * SECOND
        for program in self.all_programs:
            program.is_calm = True
        while not all(writer.is_at_rest for writer in self.all_programs):
            assert world.now_ns < deadline_ns, "the programs do not come to rest: " + "; ".join(
                f"{one.name}: {[life.state for life in one.lives]}" for one in self.all_programs
            )
            self._quiet_step()
        world.settle_servers()

    def _quiet_step(self) -> None:
        """Somebody who can do something, else on to the next deadline."""
        world = self.world
        actors, now_ns = self.actors, world.now_ns
        runnable = [child for child in world.children if world.is_runnable(child)]
        world.now_ns += 10_000
        is_anybody_ready = any(actor.is_ready(now_ns) for actor in actors)
        if runnable and (not is_anybody_ready or self.rng.random() < 0.6):
            world.step(self.rng.choice(runnable))
        elif is_anybody_ready:
            self.rng.choice([actor for actor in actors if actor.is_ready(now_ns)]).pump()
        else:
            for actor in self.actors:
                actor.pump()
            world.pass_time(min(actor.next_wake_ns(world.now_ns) for actor in self.actors))

    def _check(self) -> None:
        committed = self._read_all(is_committed=True)
        uncommitted = self._read_all(is_committed=False)
        levels = {reader.name: reader.is_committed for reader in self.readers}
        self.history.check(committed, uncommitted, levels)
        outputs = [value for place in self.made for _, value in committed[place]]
        groups: dict[str, list[Program]] = {}
        for program in self.programs:
            if program.source is not None:
                groups.setdefault(program.group, []).append(program)
        for group, programs in groups.items():
            source = programs[0].source
            assert source is not None
            names = [program.name for program in programs]
            check_transformed(names, committed[source], self._committed_offset(group), outputs)

    def _committed_offset(self, group: str) -> int:
        connection = Connection(ADDRESS, "check", self.world.runtime)
        try:
            body = {"group": group, "partitions": None}
            answer = call_json_now(connection, Api.FETCH_OFFSETS, body, timeout_ms=60_000)
        finally:
            connection.close()
        return max((row[2] for row in answer["offsets"]), default=0)

    def _read_all(self, *, is_committed: bool) -> dict[TopicPartition, Read]:
        """Read everything up to the high watermark: nothing is open any more."""
        found: dict[TopicPartition, Read] = {place: [] for place in self.places}
        with (
            self.consumer(self.places, is_committed=is_committed) as reader,
            self.consumer(self.places, is_committed=False) as other,
        ):
            ends = other.end_offsets(self.places)
            deadline_ns = self.world.now_ns + 60 * SECOND
            while any(reader.position(place) < ends[place] for place in self.places):
                for record in reader.poll(100):
                    assert record.value is not None
                    place = TopicPartition(str(record.topic), record.partition)
                    found[place].append((record.offset, record.value))
                assert self.world.now_ns < deadline_ns, (
                    "committed records cannot be read to the end: "
                    f"{[(place, reader.position(place), ends[place]) for place in self.places]}"
                )
        return found


def run(seed: int, faults: Sequence[str] | None = None) -> TransactionSchedule:
    """One schedule. Raises what it finds, with the seed and what had happened."""
    schedule = TransactionSchedule(seed, faults)
    try:
        schedule.run()
    except BaseException as error:
        error.add_note(
            f"replay with tests.sim.transactions.schedule.run({seed}): {schedule.faults}\n"
            + "\n".join(schedule.log)
        )
        raise
    return schedule
