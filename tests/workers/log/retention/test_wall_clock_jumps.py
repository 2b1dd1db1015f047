"""A wall clock that jumps, and what retention takes for old: nothing that is not, over restarts of
the flusher too.
"""

from __future__ import annotations

import errno
import random

import pytest

from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.log.retention.expiry import expires_us
from workers.log.retention.wall_clock_jumps import CLOCK_FILE, JUMPS_MAX, WallJumps

SECOND_US = 1_000_000
HOUR_US = 3_600 * SECOND_US
DAY_US = 24 * HOUR_US
NOW_US = 1_700_000_000_000_000
RETENTION_MS = 7 * 86_400_000


class World:
    """A flusher's clocks and disk."""

    def __init__(self, boot: int = 1) -> None:
        self.disk = SimDisk(("/d",))
        self.files = SimFiles(self.disk)
        self.passed_us = 0
        self.ahead_us = 0
        self.boot = boot
        self.start()

    @property
    def wall_us(self) -> int:
        return NOW_US + self.passed_us + self.ahead_us

    def start(self) -> None:
        self.jumps = WallJumps(
            self.files, "/d", self.wall_us, self.passed_us * 1_000, lambda: self.boot
        )

    def wait(self, us: int) -> None:
        self.passed_us += us
        self.look()

    def look(self) -> None:
        self.jumps.observe(self.wall_us, self.passed_us * 1_000)

    def is_expired(self, stamp_us: int) -> bool:
        """A segment whose newest record was made and appended when the clock showed `stamp_us`."""
        moved = self.jumps.moved(stamp_us)
        return expires_us(moved, moved, RETENTION_MS) < self.wall_us


@pytest.mark.parametrize("jump_us", [HOUR_US, 8 * DAY_US, 3_650 * DAY_US])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_clock_that_was_set_forward_makes_nothing_older(jump_us: int, is_restarted: bool) -> None:
    world = World()
    world.wait(DAY_US)
    before_us = world.wall_us
    world.wait(HOUR_US)
    world.ahead_us = jump_us
    if is_restarted:
        world.start()
    else:
        world.look()
    world.wait(SECOND_US)
    after_us = world.wall_us
    for _ in range(6 * 24 + 22):
        world.wait(HOUR_US)
        if is_restarted:
            world.start()
        assert not world.is_expired(before_us)
        assert not world.is_expired(after_us)
    world.wait(3 * HOUR_US)
    assert world.is_expired(before_us), "nor does it live longer"
    assert world.is_expired(after_us), "and what came behind the jump is as old as it is"


@pytest.mark.parametrize("jump_us", [HOUR_US, 8 * DAY_US, 3_650 * DAY_US])
def test_a_jump_that_is_taken_back_leaves_nothing(jump_us: int) -> None:
    world = World()
    before_us = world.wall_us
    world.wait(HOUR_US)
    world.ahead_us = jump_us
    world.wait(HOUR_US)
    world.ahead_us = 0
    world.wait(HOUR_US)
    assert world.jumps.moved(before_us) == before_us
    world.wait(7 * DAY_US)
    assert world.is_expired(before_us)


@pytest.mark.parametrize("jump_us", [-HOUR_US, -8 * DAY_US, -3_650 * DAY_US])
def test_a_clock_that_was_set_back_makes_nothing_older(jump_us: int) -> None:
    world = World()
    before_us = world.wall_us
    world.ahead_us = jump_us
    world.look()
    after_us = world.wall_us
    for _ in range(6):
        world.wait(DAY_US)
        world.start()
        assert not world.is_expired(before_us)
        assert not world.is_expired(after_us)
    world.wait(2 * DAY_US)
    assert world.is_expired(after_us)


def test_random_jumps_and_restarts_never_make_a_stamp_older_than_it_is() -> None:
    for seed in range(200):
        chance, world = random.Random(seed), World()
        stamps: list[tuple[int, int]] = []
        newest_us = 0
        for _ in range(60):
            world.wait(chance.randrange(10 * HOUR_US))
            newest_us = max(newest_us, world.wall_us)  # as a worker stamps: never back
            stamps.append((newest_us, world.passed_us))
            world.wait(SECOND_US)
            if chance.random() < 0.2:
                world.ahead_us += chance.choice([-1, 1]) * chance.choice(
                    [HOUR_US, 8 * DAY_US, 3_650 * DAY_US]
                )
            if chance.random() < 0.3:
                world.start()
            else:
                world.look()
            for stamp_us, at_us in stamps:
                age_us = world.wall_us - world.jumps.moved(stamp_us)
                assert age_us <= world.passed_us - at_us + 70 * SECOND_US, seed


def test_there_are_as_many_jumps_as_there_may_be_and_none_is_forgotten() -> None:
    world = World()
    first_us = world.wall_us
    for _ in range(3 * JUMPS_MAX):
        world.wait(HOUR_US)
        world.ahead_us += DAY_US
        world.look()
    assert len(world.jumps._jumps) == JUMPS_MAX
    assert world.jumps.moved(first_us) == first_us + 3 * JUMPS_MAX * DAY_US


def test_small_differences_and_unknown_stamps_are_left_alone() -> None:
    world = World()
    stamp_us = world.wall_us
    for _ in range(1_000):
        world.ahead_us += SECOND_US // 2
        world.wait(SECOND_US)
    assert world.jumps.moved(stamp_us) == stamp_us
    assert world.jumps.moved(0) == 0


def test_after_a_boot_of_the_host_the_wall_clock_is_believed() -> None:
    world = World()
    stamp_us = world.wall_us
    world.boot, world.ahead_us = 2, 8 * DAY_US
    world.start()
    assert world.is_expired(stamp_us)


@pytest.mark.parametrize("content", [b"", b"{}", b"no json", b"\0" * 100])
def test_a_damaged_file_is_made_anew(content: bytes) -> None:
    world = World()
    fd = world.files.open_for_write(f"/d/{CLOCK_FILE}")
    world.files.truncate(fd, 0)
    world.files.write_at(fd, [content], 0)
    world.files.close(fd)
    world.start()
    world.ahead_us = DAY_US
    world.look()
    world.start()
    assert world.jumps.moved(NOW_US) == NOW_US + DAY_US


def test_a_full_disk_keeps_nothing_from_being_removed_and_the_jump_is_kept_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr("workers.log.retention.wall_clock_jumps.write_durably", full)
        world.ahead_us = DAY_US
        world.look()
        assert world.jumps.moved(NOW_US) == NOW_US + DAY_US
    world.look()
    world.start()
    assert world.jumps.moved(NOW_US) == NOW_US + DAY_US
