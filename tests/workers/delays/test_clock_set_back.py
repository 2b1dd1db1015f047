"""Rows that are changed around a clock that is set back, and a scheduler that is restarted then:
each comes once, at its last due time.
"""

from __future__ import annotations

import pytest

from tests.kit.stepped.delays import MS, SECOND, DelayWorld, make_small
from workers.delays.store import pending_store

NEVER_NS = 1 << 62


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def _save(world: DelayWorld) -> None:
    """Pass time until the cursor is behind all that was read."""
    while (
        world.partition._store.cursor < world.bench.table.read(1).high_watermark
        or world.partition._store.is_busy
    ):
        world.pass_time(100 * MS)
        world.step()


def _until_delivered(world: DelayWorld, count: int) -> None:
    while len(world.delivered()) < count or world.partition._due.sent is not None:
        world.pass_time(100 * MS)
        world.step()


def _file_count(world: DelayWorld) -> int:
    return world.partition._store.file_count


@pytest.mark.parametrize("changed_to", [None, 3_000 * SECOND])
def test_a_row_changed_before_the_clock_was_set_back_is_found_again_after_a_restart(
    changed_to: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is saved behind the mark of the new epoch, with a cursor before the change."""
    world = DelayWorld(1)
    world.schedule([60 * SECOND, 80 * SECOND])
    _save(world)
    first, _ = world.rows.values()
    monkeypatch.setattr(pending_store, "SAVE_AFTER_NS", NEVER_NS)
    world.change(first, None if changed_to is None else world.wall_us + changed_to)
    assert first.fate == ("cancelled" if changed_to is None else "waits")
    monkeypatch.setattr(pending_store, "TIDY_INTERVAL_NS", NEVER_NS)
    _until_delivered(world, 1)
    files = _file_count(world)
    world.pass_time(MS, -30 * SECOND)
    while not world.partition._marks.epoch:
        world.step()
    monkeypatch.setattr(pending_store, "TIDY_INTERVAL_NS", 0)
    while _file_count(world) == files:
        world.pass_time(100 * MS)
        world.step()
    world.restart_scheduler()
    monkeypatch.undo()
    world.finish()
    assert len(world.delivered()) == 2 - (changed_to is None)


def test_rows_that_the_mark_of_an_epoch_closes_are_not_pending_whenever_the_log_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were due and not delivered when the clock was set back. The mark behind that of the
    epoch gets lost.
    """
    world = DelayWorld(2)
    world.schedule([10 * SECOND] * 20)
    _save(world)
    world.pass_time(100 * SECOND)
    while not len(world.partition._due.ready):
        world.settle()
        world.partition.step(world.now_ns, world.wall_us)
    world.pass_time(MS, -30 * SECOND)
    world.restart_scheduler()  # which delivers nothing before it has read a mark of its own
    send = world.partition._send
    monkeypatch.setattr(
        world.partition, "_send", lambda *batch: world.partition._marks.epoch > 0 or send(*batch)
    )
    while not world.partition._marks.epoch:
        world.pass_time(100 * MS)
        world.partition.step(world.now_ns, world.wall_us)
        world.settle()
    waiting = [row for row in world.rows.values() if row.name not in dict(world.delivered())]
    assert waiting
    assert not any(world.partition.waits(row.offset) for row in waiting)
    world.restart_scheduler()
    world.partition.catch_up()
    assert not any(world.partition.waits(row.offset) for row in waiting)
    world.finish()
    assert len(world.delivered()) == 20
