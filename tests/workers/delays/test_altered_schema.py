"""The schema of a topic with delayed records is altered: each row comes once, in the topic's
present columns, whatever version it was written in and whichever process is killed.
"""

from __future__ import annotations

import itertools

import pytest

from tailrace.format.directory.delay_files import PENDING_FILE, Manifest
from tests.kit import seeds
from tests.kit.log_files.simdisk import SimFiles
from tests.kit.matrices import short
from tests.kit.stepped.altered_delays import AlteredDelayWorld
from tests.kit.stepped.delay_schedules import (
    change_one,
    finish_with_a_kill_at,
    harm_and_step,
    schedule_some,
)
from tests.kit.stepped.delays import MS, SECOND, make_small
from workers.segment.files import read_whole


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def run(seed: int, steps: int = 60) -> None:
    world = AlteredDelayWorld(seed)
    rng = world.rng
    alters_at = {rng.randrange(steps), rng.randrange(steps)}
    if rng.random() < 0.5:
        world.schedule_recurring(
            rng.randint(20 * MS, 600 * SECOND), rng.choice((300 * SECOND, 86_400 * SECOND))
        )
    for number in range(steps):
        what = rng.random()
        if number in alters_at:
            world.alter()
        elif what < 0.35:
            schedule_some(world)
        elif what < 0.5 and world.rows:
            change_one(world)
        elif what < 0.7:
            jump = rng.randint(-600, 600) * SECOND if rng.random() < 0.05 else 0
            world.pass_time(rng.randint(1, rng.choice((20 * MS, 3 * SECOND, 600 * SECOND))), jump)
        harm_and_step(world, what)
    world.finish()


@pytest.mark.parametrize(
    "block",
    [
        *short(seeds.fixed_blocks(2, 1)),
        *(pytest.param(block, marks=pytest.mark.long) for block in seeds.new_blocks(24, 2)),
    ],
    ids=seeds.block_name,
)
def test_each_row_comes_once_in_the_present_columns(block: range) -> None:
    seeds.run_each(run, block)


PLACES = (
    ("scheduler.after_delivery", 3), ("scheduler.before_manifest", 3),
    ("scheduler.after_manifest", 2), ("scheduler.after_move", 1),
)  # fmt: skip


@pytest.mark.parametrize(("place", "visit"), PLACES)
def test_a_scheduler_killed_between_an_alteration_and_the_next_save(place: str, visit: int) -> None:
    world = AlteredDelayWorld(visit)
    finish_with_a_kill_at(
        world, place, visit, lambda number: world.alter() if number in (2, 5) else None
    )


def manifest_of(world: AlteredDelayWorld) -> Manifest:
    return Manifest.decode(read_whole(SimFiles(world.disk), f"/data/t@delay-0/{PENDING_FILE}"))


def saved(world: AlteredDelayWorld) -> None:
    world.pass_time(400 * MS)
    for _ in range(40):
        world.step()


def test_bucket_files_have_rows_of_one_version_which_the_manifest_names() -> None:
    world = AlteredDelayWorld(3)
    world.schedule([7_200 * SECOND] * 20)
    saved(world)
    assert (manifest_of(world).schema_id, manifest_of(world).file_schemas) == (0, {})
    for _ in range(2):
        world.alter()
        world.tell()
        world.step()
        assert manifest_of(world).schema_id == 22, "before anything is saved"
        world.schedule([7_200 * SECOND] * 20)
        saved(world)
    manifest = manifest_of(world)
    assert sorted(manifest.file_schemas) == ["12", "22", "32"]
    assert sorted(itertools.chain(*manifest.file_schemas.values())) == [
        entry.number for entry in manifest.files
    ]
    world.restart_scheduler()
    assert world.partition.pending_count() == 60
    world.finish()


def test_rows_of_all_versions_are_listed_cancelled_and_rescheduled() -> None:
    world = AlteredDelayWorld(4)
    for _ in range(3):
        world.schedule([3_600 * SECOND] * 4)
        saved(world)
        world.schedule([3_600 * SECOND] * 4)
        world.alter()
        world.tell()
    world.partition.catch_up()
    listed, _ = world.partition.listed((0, 0), 1 << 60, 100, None)
    assert len(listed) == 24
    for number, row in enumerate(list(world.rows.values())):
        world.change(row, None if number % 2 else world.wall_us + 60 * SECOND)
    assert {row.fate for row in world.rows.values()} == {"waits", "cancelled"}
    world.restart_scheduler()
    world.finish()
    assert len(world.delivered()) == 12


def test_a_delivery_that_meets_the_alteration_on_its_way_is_made_again() -> None:
    world = AlteredDelayWorld(5)
    world.schedule([SECOND] * 4)
    world.settle()
    world.pass_time(2 * SECOND)
    while world.partition._due.sent is None:
        world.partition.step(world.now_ns, world.wall_us)
        if world.partition._due.sent is None:
            world.settle()
    world.alter()  # the worker reads this first
    world.settle()
    assert not world.delivered(), "it was of the earlier version"
    world.finish()
    assert {header.schema_id for _, header in world.delivered()} == {21}


def test_nothing_is_delivered_while_only_one_of_topic_and_delay_log_is_known_as_altered() -> None:
    world = AlteredDelayWorld(6)
    world.schedule([SECOND] * 4)
    world.alter()
    world.partition.assign(world._news.pop(0))
    world.pass_time(2 * SECOND)
    for _ in range(40):
        world.settle()
        world.partition.step(world.now_ns, world.wall_us)
    assert not world.delivered()
    world.finish()


def test_a_batch_of_a_version_that_is_not_known_yet_is_read_when_it_is() -> None:
    world = AlteredDelayWorld(7)
    world.alter()
    world.schedule([60 * SECOND] * 3)
    world.partition.catch_up()
    assert (world.partition.pending_count(), world.partition.describe()["lost_rows"]) == (0, 0)
    deadline_ns = world.partition.next_deadline_ns()
    assert deadline_ns is not None
    world.partition.step(world.now_ns, world.wall_us)
    with pytest.raises(ValueError, match="has schema 22, and the newest version"):
        world.partition.step(world.now_ns + 10_000_000_000, world.wall_us)
    world.tell()
    world.partition.catch_up()
    assert world.partition.pending_count() == 3
    world.finish()
