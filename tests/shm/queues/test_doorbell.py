"""Bells: looking before sleeping, with an injected clock and poll; and real ones."""

from __future__ import annotations

import threading

from shm.queues.doorbell import Doorbell, spin_then_sleep
from tests.kit.processes import HANG_LIMIT_S


class World:
    """A clock that goes on by 1 us with each look, and a bell that rings at a time. Sleeping is
    noted, and lasts until then.
    """

    def __init__(self, rings_at_us: int | None) -> None:
        self.now_us = 0
        self._rings_at_us = rings_at_us
        self.looks = 0
        self.slept: list[float | None] = []

    def monotonic_ns(self) -> int:
        return self.now_us * 1000

    def poll(self, timeout_ms: float | None = None, /) -> list[tuple[int, int]]:
        if timeout_ms != 0:
            self.slept.append(timeout_ms)
            if self._rings_at_us is not None:
                self.now_us = max(self.now_us, self._rings_at_us)
        else:
            self.now_us += 1
            self.looks += 1
        return (
            [(7, 1)] if self._rings_at_us is not None and self.now_us >= self._rings_at_us else []
        )


def test_a_ring_while_it_looks_needs_no_sleep() -> None:
    world = World(30)
    assert spin_then_sleep(world, None, 50_000, world.monotonic_ns) == [(7, 1)]
    assert (world.now_us, world.slept) == (30, [])


def test_it_looks_for_so_long_and_then_sleeps() -> None:
    world = World(80)
    assert spin_then_sleep(world, None, 50_000, world.monotonic_ns) == [(7, 1)]
    assert (world.looks, world.slept) == (50, [None])


def test_without_a_time_to_look_it_sleeps_at_once() -> None:
    world = World(None)
    assert spin_then_sleep(world, 12.0, 0, world.monotonic_ns) == []
    assert (world.looks, world.slept) == (0, [12.0])


def test_it_looks_no_longer_than_it_would_sleep() -> None:
    world = World(None)
    assert spin_then_sleep(world, 0.02, 50_000, world.monotonic_ns) == []
    assert (world.looks, world.slept) == (20, [0.02])


def test_rings_are_not_missed_between_looking_and_sleeping() -> None:
    """Two processes' worth of it: each rings the other 3,000 times, looking for a time within which
    about half of the rings come. A missed one hangs.
    """
    there, back = Doorbell.create(), Doorbell.create()

    def answer() -> None:
        for _ in range(3000):
            there.wait(None, 5_000)
            back.ring()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    for _ in range(3000):
        there.ring()
        back.wait(None, 5_000)
    thread.join(HANG_LIMIT_S)
    assert not thread.is_alive()
