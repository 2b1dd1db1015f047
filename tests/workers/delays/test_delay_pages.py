"""Rows that wait for long: which files hold them, and the pages that list them."""

from __future__ import annotations

import pytest

from tailrace.format.directory.delay_files import BUCKET_SUFFIX
from tests.kit.stepped.delays import MS, SECOND, SPANS, DelayWorld, make_small, tick_of
from workers.delays import listing
from workers.delays.store import bucket_files


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def test_far_rows_lie_in_few_files_and_none_are_left_behind() -> None:
    world = DelayWorld(1)
    for _ in range(10):
        world.schedule([world.rng.randint(0, 900 * 86_400 * SECOND) for _ in range(18)])
        world.pass_time(400 * MS)
        while world.step():
            pass
    described = world.partition.describe()
    assert described["pending"] == 180
    assert described["memory_bytes"] < 50_000
    assert 0 < described["files"] <= 64 * bucket_files.LEVELS_USED
    world.finish()
    while True:
        if world.step():
            continue
        deadline_ns = world.partition.next_deadline_ns()
        if deadline_ns is None:
            break
        world.pass_time((deadline_ns - world.now_ns) // 1000 + 1)
    assert not [name for name in world.disk.names if name.endswith(BUCKET_SUFFIX)]


@pytest.mark.parametrize("limit", [1, 7, 1_000])
def test_pages_list_each_pending_row_once_in_due_order_from_memory_and_files(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "KEY_SCAN_ROWS", 9)
    world = DelayWorld(limit)
    for number in range(6):
        world.schedule(
            [world.rng.choice(SPANS[3:]) + world.rng.randint(0, 5_000) for _ in range(30)]
        )
        if number < 5:
            world.pass_time(400 * MS)
            while world.step():
                pass
    waiting = sorted((row.due_us, row.offset) for row in world.rows.values())
    for row in world.rows.values():
        if row.offset % 3 == 0:
            world.change(row, None)
    waiting = [each for each in waiting if each[1] % 3]

    def listed(begin_tick: int, end_tick: int, key: bytes | None) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        begin: tuple[int, int] | None = (begin_tick, 0)
        while begin is not None:
            rows, reached = world.partition.listed(begin, end_tick, limit, key)
            assert len(rows) <= limit
            found += [(row["due_us"], row["offset"]) for row in rows]
            begin = None if reached is None else (reached[0], reached[1] + 1)
        return found

    by_tick = sorted(waiting, key=lambda each: (tick_of(each[0]), each[1]))
    first, middle = tick_of(by_tick[0][0]), tick_of(by_tick[len(by_tick) // 2][0])
    assert listed(0, 1 << 43, None) == by_tick
    assert listed(first, middle, None) == [each for each in by_tick if tick_of(each[0]) < middle]
    assert listed(0, 1 << 43, b"no such key") == []
