"""Rows that are changed around a clock that is set back, and a scheduler that is restarted then:
each comes once, at its last due time.
"""

from __future__ import annotations

import pytest

from tests.kit.delays import MS, SECOND, DelayWorld, make_small
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
    while len(world.delivered()) < count or world.partition._sent is not None:
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
