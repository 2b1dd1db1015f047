"""Simulated schedules: kills anywhere, power loss, disks that fail or fill up, clocks that jump.

At the end of each, everything that was promised holds. `make test` runs the seeds below 12 and
those that once found a fault; `make test-all` runs those below 36 and new ones, which its tests'
ids name.
"""

from __future__ import annotations

import errno
import logging
import random
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from appliance.config.default_schema import DEFAULT_SCHEMA_MESSAGE
from appliance.control import controller as controller
from appliance.groups.share.partition.share_partition import SharePartition
from appliance.groups.share.record_requests import RecordRequests
from shm.memory.layout import SlotState
from tailrace.core.errors import CorruptBatchError, TailraceError
from tests.kit import seeds
from tests.kit.batches import TIME_US
from tests.kit.matrices import short
from tests.sim import faults, schedule
from tests.sim.actors import TOPIC
from tests.sim.machine.machine_parts import PowerLost, SimGroupStore
from tests.sim.machine.world import World
from tests.sim.members.group_members import GroupHistory
from tests.sim.members.share_history import QueueHistory
from tests.sim.plan import plan
from tests.sim.schedule import Schedule, run

pytestmark = pytest.mark.filterwarnings("ignore:topic '(t|later)' has durability=memory")
SCHEDULES_A_TEST = 20
FIXED = 36


@pytest.fixture(autouse=True)
def quiet() -> object:
    """Thousands of simulated failures have much to say."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow_because("twelve schedules of a whole appliance")
@pytest.mark.parametrize("block", short(seeds.fixed_blocks(3, FIXED // 3)), ids=seeds.block_name)
def test_schedules_keep_every_promise(block: range) -> None:
    for seed in block:
        assert run(seed).world.steps >= 200


@pytest.mark.long
@pytest.mark.parametrize("block", seeds.new_blocks(80, SCHEDULES_A_TEST), ids=seeds.block_name)
def test_new_schedules_keep_every_promise(block: range) -> None:
    for seed in block:
        assert run(seed).world.steps >= 200


def test_readers_of_a_partition_that_is_offline_do_not_keep_everybody_busy() -> None:
    """In this one a log cannot be opened while a producer still waits for it: readers that asked
    again at once let no time pass.
    """
    assert run(854).world.steps < 100_000


@pytest.mark.parametrize(
    ("seed", "fault"),
    [
        (
            21981,
            (
                "the worker of a topic had not heard that its delay log's disk had failed: nothing "
                "was delivered any more"
            ),
        ),
        (
            60388,
            (
                "a segment that was given up inside a batch was called damaged from where the next "
                "one begins"
            ),
        ),
        (
            3490897294,
            (
                "a log that a flusher's successor could not open was revived in an epoch that its "
                "worker had seen: its next batch left a gap"
            ),
        ),
    ],
)
def test_what_a_seed_has_found_stays_mended(seed: int, fault: str) -> None:
    assert run(seed).world.steps < 100_000, fault


@pytest.mark.parametrize("seed", [35, 1876])
def test_a_seed_replays_exactly(seed: int) -> None:
    first, second = run(seed), run(seed)
    assert (first.world.digest, first.world.steps, first.log) == (
        second.world.digest,
        second.world.steps,
        second.log,
    )
    assert first.history.acknowledged == second.history.acknowledged


def test_power_lost_while_the_controller_is_built_leaves_its_catalog_to_no_later_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Objects that it had opened live on where the garbage collector does not look any more
    (`gc.freeze`), and with it a database in memory, which has a name.
    """
    kept: list[object] = []

    def lose_power(*arguments: object) -> None:
        kept.append(arguments)
        raise PowerLost

    for _ in range(2):
        world = World(random.Random(0))
        with world.interruptible():
            catalog = world.open_catalog()
            catalog.slots.register([(path, path) for path in world.data_dirs])
            catalog.create_topic(TOPIC, 1, {}, DEFAULT_SCHEMA_MESSAGE, False, TIME_US)
            catalog.close()
            with monkeypatch.context() as patched:
                patched.setattr(controller, "build", lose_power)
                with pytest.raises(PowerLost):
                    world.boot()
            world.lose_power()
            world.settle_servers()
        world.close()
    assert len(kept) == 2


def test_a_catalog_that_stays_open_is_not_seen_by_the_next_world() -> None:
    first, second = World(random.Random(0)), World(random.Random(0))
    with closing(first.open_catalog()) as left_open:
        left_open.slots.register([(path, path) for path in first.data_dirs])
        left_open.create_topic(TOPIC, 1, {}, DEFAULT_SCHEMA_MESSAGE, False, TIME_US)
        first.close()
        with closing(second.open_catalog()) as catalog:
            assert catalog.topics() == []
        second.close()


def _search(first: int = 0) -> None:
    """Run seeds until one finds the fault; `first` is near one that does, which is a saving and no
    condition.
    """
    for seed in range(first, first + 400):
        run(seed)


@pytest.mark.slow_because("each planted fault is looked for in many schedules")
def test_the_checks_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flusher that calls durable what it has not synced is found out."""
    from workers.log.partition_log import PartitionLog

    def forgetful(log: PartitionLog) -> None:
        live = log.live
        if live is not None:
            live.synced_end, live.synced_next = live.end, log.next_offset

    monkeypatch.setattr(PartitionLog, "sync", forgetful)
    with pytest.raises(
        (AssertionError, CorruptBatchError), match=r"lost|back|fell|told|ends below|damaged"
    ):
        _search(34)


@pytest.mark.parametrize(
    ("queues", "first", "found"),
    [
        (0.0, 12, "was answered|epochs do not go back|had been given before"),
        (1.0, 10, "next process of groups|given out|refused under|no group"),
    ],
)
def test_a_process_of_groups_that_answers_before_it_commits_is_found(
    monkeypatch: pytest.MonkeyPatch, queues: float, first: int, found: str
) -> None:
    monkeypatch.setattr(schedule, "QUEUE_RATE", queues)

    def forgetful(store: SimGroupStore) -> None:
        store._world.fate.count_down()
        for write in store.before_commit:
            write()

    monkeypatch.setattr(SimGroupStore, "commit", forgetful)
    with pytest.raises(AssertionError, match=found):
        _search(first)


@pytest.mark.parametrize("history", [GroupHistory, QueueHistory])
def test_a_check_that_fails_while_an_answer_is_handled_fails_the_schedule(
    monkeypatch: pytest.MonkeyPatch, history: type
) -> None:
    """A connection takes an exception of its owner's for an answer that it does not understand."""

    def given(*_: object) -> None:
        raise AssertionError("as it must be")

    monkeypatch.setattr(history, "given", given)
    with pytest.raises(AssertionError, match="as it must be"):
        _search()


@pytest.mark.parametrize(
    ("fault", "first", "found"),
    [
        ("locks", 34, "two locks at once|under a lock that had"),
        ("numbers", 24, "under a lock that had"),
        ("members", 16, "under a lock that had|twice"),
    ],
)
def test_a_queue_that_breaks_a_promise_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: str, first: int, found: str
) -> None:
    """Locks that a restart forgets; a request that is carried out a second time; acknowledgements
    that are taken from anybody.
    """
    monkeypatch.setattr(schedule, "QUEUE_RATE", 1.0)
    if fault == "locks":
        monkeypatch.setattr(
            SharePartition,
            "extend_locks",
            lambda partition, *_: partition._free_where(lambda _: True),
        )
    elif fault == "numbers":
        remember = RecordRequests._after_records
        monkeypatch.setattr(
            RecordRequests,
            "_after_records",
            lambda groups, group, member, _, answer: remember(groups, group, member, 0, answer),
        )
    else:
        acknowledge = SharePartition.acknowledge

        def careless(
            partition: SharePartition, member: str, first: int, last: int, *rest: Any
        ) -> list[tuple[int, int]]:
            holders = {
                span.state.member
                for span in partition.spans.between(first, last)
                if span.state.member
            }
            for holder in holders - {member}:
                acknowledge(partition, holder, first, last, *rest)
            return [] if holders - {member} else acknowledge(partition, member, first, last, *rest)

        monkeypatch.setattr(SharePartition, "acknowledge", careless)
    with pytest.raises(AssertionError, match=found):
        _search(first)


@pytest.mark.parametrize(
    "seed",
    [
        *range(4),
        *(
            pytest.param(block[0], marks=pytest.mark.long, id=seeds.block_name(block))
            for block in seeds.new_blocks(20, 1)
        ),
    ],
)
def test_a_dying_disk_takes_only_its_own_partitions_offline(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = Schedule(
        seed,
        replace(
            plan(random.Random(seed)),
            data_dirs=2,
            partitions=4,
            durability="disk",
            acks="all",
            faults=("disk error",),
            delays=False,
        ),
    )
    world = dying.world

    def dead(operation: str, path: str) -> None:
        if path.startswith("/disk1/") and operation in ("write", "sync", "create", "truncate"):
            raise OSError(errno.EIO, "dead", path)

    monkeypatch.setattr(faults, "break_disk", lambda *_: setattr(world.disk, "hook", dead))
    dying.run()
    refused = {refusal.partition for actor in dying.producers for refusal in actor.refusals}
    on_the_good_disk = {p for p in range(4) if f"/disk0/t-{p}" in world.disk.names}
    assert len(on_the_good_disk) == 2
    assert not refused & on_the_good_disk, "partitions of the good disk were refused"
    assert {p for p, _ in dying.history.acknowledged} >= on_the_good_disk


@pytest.mark.slow_because("the fault shows in few schedules")
def test_a_state_that_is_published_before_it_is_written_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulation looks between a store and what follows it."""
    from shm.tables import partition_table

    def early(
        table: partition_table.PartitionTable, slot: int, state: partition_table.PartitionState
    ) -> None:
        start = table.layout.slot(slot)
        count = table._words[start // 8] + 1
        table._words[start // 8] = count
        partition_table._STATE.pack_into(
            table._bytes, start + table.layout.STATES[count & 1], *state
        )

    monkeypatch.setattr(partition_table.PartitionTable, "write", early)
    for check in (
        partition_table.read_state,
        lambda *_: partition_table.PartitionState.empty(bytes(16), 0, SlotState.FREE, 0),
    ):
        monkeypatch.setattr(
            partition_table, "read_state", check
        )  # with the invariants, and without them
        with pytest.raises((AssertionError, TailraceError)):
            _search(19)
