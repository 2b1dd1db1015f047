"""A scheduler that is killed, refused or interrupted at one place: each row comes once, none
early.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace

import pytest

from shm.crash_points import armed
from shm.messages.lane_messages import Assignment
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.core.error_codes import ErrorCode
from tailrace.core.schedule.delays import NONE_DELIVERED, TICK_BITS, TICK_US
from tailrace.format.directory.delay_files import BUCKET_SUFFIX
from tailrace.format.record_batch.batch_header import BatchHeader
from tailrace.kernel.reference_arrow import default_rows
from tests.kit.batches import reseal
from tests.kit.matrices import short
from tests.kit.stepped.delay_schedules import finish_with_a_kill_at
from tests.kit.stepped.delays import LOG_SEED, MS, SCHEMA, SECOND, DelayWorld, Killed, make_small
from workers.delays.delivery import delivery_marks as marks
from workers.delays.store import pending_store


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


PLACES = (
    "scheduler.after_delivery", "scheduler.before_manifest", "scheduler.after_manifest",
    "scheduler.after_move",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "visit"),
    short([*zip(PLACES, (1, 2, 5, 1), strict=True), *itertools.product(PLACES, (1, 2, 5))],
    *range(4)),
)  # fmt: skip
def test_a_scheduler_killed_at_a_named_place_delivers_each_once(name: str, visit: int) -> None:
    finish_with_a_kill_at(DelayWorld(visit), name, visit)


def test_a_full_disk_delays_what_is_to_be_saved_and_loses_nothing() -> None:
    world = DelayWorld(3)
    world.schedule([world.rng.randint(0, 7_200 * SECOND) for _ in range(200)])
    world.is_full = True
    for _ in range(20):
        world.pass_time(SECOND)
        for _ in range(20):
            world.step()
    assert world.restarts
    world.is_full = False
    world.finish()


def test_a_damaged_chunk_is_said_and_counted_and_costs_only_itself() -> None:
    world = DelayWorld(4)
    for _ in range(4):
        world.schedule([7_200 * SECOND + world.rng.randint(0, 600 * SECOND) for _ in range(50)])
        world.pass_time(400 * MS)
        while world.step():
            pass
    (path,) = [name for name in world.disk.names if name.endswith(BUCKET_SUFFIX)][:1]
    inode = world.disk.names[path]
    assert inode is not None
    inode.data[len(inode.data) // 2 + 300] ^= 1
    with pytest.raises(AssertionError, match="never came"):
        world.finish()
    lost = world.partition.describe()["lost_rows"]
    assert 0 < lost < 200
    assert len(world.delivered()) == 200 - lost
    assert [name for name in world.disk.names if name.endswith(".damaged")] == [f"{path}.damaged"]


def test_a_kill_while_a_cancelled_bucket_is_compacted_loses_none_of_the_rest() -> None:
    def die() -> None:
        raise Killed

    world = DelayWorld(6)
    for _ in range(6):
        world.schedule([30 * 86_400 * SECOND + world.rng.randint(0, SECOND) for _ in range(40)])
        world.pass_time(400 * MS)
        while world.step():
            pass
    for number, row in enumerate(world.rows.values()):
        if number % 5:
            world.change(row, None)
    with armed("scheduler.after_move", die, 2):
        for _ in range(200):
            world.pass_time(100 * MS)
            world.step()
    assert world.restarts == 1, "a compaction was under way, and was killed"
    world.finish()


def test_a_kill_behind_a_damaged_chunk_loses_no_more_than_that() -> None:
    world = DelayWorld(4)
    for _ in range(4):
        world.schedule([7_300 * SECOND + world.rng.randint(0, 60 * SECOND) for _ in range(50)])
        world.pass_time(400 * MS)
        while world.step():
            pass
    (path,) = [name for name in world.disk.names if name.endswith(BUCKET_SUFFIX)]
    inode = world.disk.names[path]
    assert inode is not None
    inode.data[-300] ^= 1  # in the last chunk
    world.pass_time(7_400 * SECOND)
    while world.partition.describe()["lost_rows"] == 0:
        world.step()
    assert len(world.delivered()) < 150, "the kill comes between the reading and the last delivery"
    world.restart_scheduler()
    with pytest.raises(AssertionError, match="never came"):
        world.finish()
    assert len(world.delivered()) == 150


@pytest.mark.parametrize("steps", range(4))
def test_a_row_rescheduled_while_it_is_saved_comes_also_if_its_first_time_passes_before_it_is_saved(
    steps: int,
) -> None:
    """The cursor stands before the change then, and the change is read again after a restart: it
    found no row, and the row never came. `steps` of the save before the change.
    """
    world = DelayWorld(8)
    for seconds in (3, 9):  # each read by itself
        world.schedule([seconds * SECOND])
        world.settle()
        world.partition.catch_up()
    world.pass_time(400 * MS)
    store = world.partition._store
    while not store.is_busy:
        world.step()
    for _ in range(steps):
        if store.is_busy:
            store._resume()
    row = next(iter(world.rows.values()))
    row_was_due_us = row.due_us
    world.change(row, world.wall_us + 600 * SECOND)
    world.pass_time(4 * SECOND)
    partition = world.partition
    partition._now_ns, partition._wall_us = world.now_ns, world.wall_us
    partition._ask_for_mark()  # it closes the first time, and no step of the save is done
    world.settle()
    partition.catch_up()
    assert partition._marks.closed_tick * TICK_US > row_was_due_us
    store._finish_job()
    assert store.cursor == 2, "the change is behind what was saved"
    world.restart_scheduler()
    world.finish()
    assert len(world.delivered()) == 2


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("delivered", [0, 1])
def test_rows_saved_while_they_were_handed_out_wait_again_when_the_clock_is_set_back(
    steps: int, delivered: int
) -> None:
    """`steps` between the end of the saving and the setting back: the file is not loaded yet, or is
    loaded without what was handed out. `delivered`: how many rows of that came in time.
    """
    world = DelayWorld(7)

    def is_saving() -> bool:
        return world.partition._store.is_busy

    world.schedule([2 * SECOND, 2 * SECOND + 4 * MS, 2 * SECOND + 500 * MS])
    world.pass_time(1_980 * MS)
    while not is_saving():
        world.step()
    world.pass_time(15 * MS)
    while not len(world.partition._due.ready):
        world.settle()
        world.step()
    assert is_saving(), "the first two were handed out while they were being saved"
    while is_saving():
        world.step()
    world.pass_time(6 * MS * delivered)
    for _ in range(steps):
        world.step()
    while len(world.delivered()) < delivered or world.partition._due.sent is not None:
        world.step()
    assert len(world.partition._due.ready) == 2 - delivered
    world.pass_time(MS, -10 * SECOND)
    world.finish()
    assert len(world.delivered()) == 3


def test_a_row_saved_to_a_bucket_that_is_being_loaded_is_delivered() -> None:
    """The bucket takes several steps to load; nothing was saved for long, so that is done between
    them.
    """
    world = DelayWorld(3)
    begin_us = ((world.wall_us // TICK_US >> 12) + 4 << 12) * TICK_US
    for number in range(12):
        world.schedule([begin_us + SECOND + number * MS - world.wall_us])
        world.pass_time(400 * MS)
        for _ in range(12):
            world.step()
    store = world.partition._store
    assert [len(file.chunks()) for file in store._buckets.all] == [12]
    world.schedule([begin_us + 1_500 * MS - world.wall_us])
    world.settle()
    world.partition.catch_up()
    world.pass_time(begin_us - 1_900 * MS - world.wall_us)
    assert world.partition.step(world.now_ns, world.wall_us)
    assert store._loading is not None
    assert store.is_behind
    world.finish()


@pytest.mark.parametrize("steps", range(7))
def test_rows_released_while_their_bucket_is_being_moved_come_once(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark is on its way while a bucket that begins before it is saved, and comes `steps` later:
    before, in and behind its being moved to lower buckets.
    """
    monkeypatch.setattr(pending_store, "SAVE_AFTER_NS", 1_000_000)
    world = DelayWorld(3)
    begin_us = ((world.wall_us // TICK_US >> 18) + 1 << 18) * TICK_US
    world.pass_time(begin_us - 20 * MS - world.wall_us)
    world.schedule(
        [
            begin_us + due - world.wall_us
            for due in (2 * MS, 258_100 * MS, 259 * SECOND, 260 * SECOND, 262 * SECOND)
        ]
    )

    def step() -> None:
        world.partition.step(world.now_ns, world.wall_us)

    def is_saving() -> bool:
        return world.partition._store.is_busy

    step()
    world.pass_time(2 * MS)
    while not is_saving():
        step()
    world.pass_time(10 * MS)
    world.bench.now_us, world.bench.now_ns = world.wall_us, world.now_ns
    step()
    assert world.partition._marks.is_asked
    while is_saving():
        step()
    for _ in range(steps):
        step()
    world.finish()
    assert len(world.delivered()) == 5


def _rest(world: DelayWorld) -> None:
    """Until a step has nothing to do; the world holds its next deadline against the clock."""
    for _ in range(100):
        if not world.step():
            return
    raise AssertionError("there is always something to do")


def test_a_delivery_that_is_refused_while_a_lost_mark_waits_for_it_does_not_make_the_scheduler_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = DelayWorld(1)
    send = world.partition._send
    kept: list[tuple[Assignment, bytes]] = []

    def lose(target: Assignment, data: bytearray) -> bool:
        kept.append((target, bytes(data)))
        return True

    monkeypatch.setattr(world.partition, "_send", lose)
    world.schedule([0, 20 * SECOND])
    _rest(world)
    world.pass_time(SECOND)
    _rest(world)
    assert [target.slot for target, _ in kept] == [1, 1], (
        "two marks: the first is slow, the second gets lost"
    )
    send(*kept[0])
    world.settle()
    _rest(world)
    assert [target.slot for target, _ in kept] == [1, 1, 0], (
        "what the first mark closes is delivered, and refused: its partition is offline"
    )
    for tries in range(2, 5):
        world.pass_time(SECOND)
        _rest(world)
        assert [target.slot for target, _ in kept] == [1, 1] + [0] * tries
        assert world.partition.next_deadline_ns() == world.now_ns + SECOND * 1000, (
            "until it is sent again there is nothing to do"
        )
    monkeypatch.setattr(world.partition, "_send", send)
    world.finish()


@pytest.mark.parametrize("passed", [0, 1])
def test_a_full_lane_is_tried_again_a_little_later_and_not_without_a_pause(
    passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = DelayWorld(2)
    send = world.partition._send
    takes = [True] * passed
    monkeypatch.setattr(world.partition, "_send", lambda *_: bool(takes) and takes.pop())
    world.schedule([0])
    _rest(world)
    for _ in range(passed):  # what the lane took is lost, and sent again
        world.pass_time(SECOND)
        _rest(world)
    assert world.partition.next_deadline_ns() == world.now_ns + marks.RETRY_INTERVAL_NS
    monkeypatch.setattr(world.partition, "_send", send)
    world.pass_time(marks.RETRY_INTERVAL_NS // 1000)
    assert world.step(), "it is tried when the deadline comes"
    world.finish()


def test_a_mark_that_comes_behind_the_end_of_its_topic_is_refused_and_the_worker_lives() -> None:
    world = DelayWorld(9)
    world.schedule([SECOND])
    world.bench.assign(replace(world.topic, dropped=True, version=2))
    world.settle()
    mark = world.partition._marks.encode(
        1 << TICK_BITS | world.wall_us // TICK_US,
        NONE_DELIVERED,
        world.log.schema_id,
        world.wall_us,
    )
    assert world.partition._send(world.log, mark)
    before = world.bench.table.read(1).high_watermark
    world.settle()
    assert world.bench.table.read(1).high_watermark == before
    assert world.bench.answers()[-1][0] == ErrorCode.UNKNOWN_SEQUENCE


def test_rows_with_wild_offsets_under_right_checksums_are_refused_and_the_rest_is_delivered() -> (
    None
):
    world = DelayWorld(5)
    world.schedule([SECOND] * 3)
    rows = arrow_batch.with_delays(
        default_rows([1], [b"k"], [b"bad"], None), SCHEMA, [world.wall_us], None
    )
    data = arrow_batch.encode_as(rows, BatchHeader(record_count=1, schema_id=1), LOG_SEED, "none")
    at = data.rindex(struct.pack("<ii", 0, len(b"bad")))
    data[at : at + 8] = struct.pack("<ii", 0, 1 << 30)
    world.bench.send(reseal(data, LOG_SEED), slot=1)
    world.settle()
    world.schedule([2 * SECOND] * 3)
    world.finish()
    assert world.partition.describe()["lost_rows"] == 1
