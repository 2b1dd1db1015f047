"""Fronts are rung for what settles when they wait for it: which ones, and between two processes
without missing a ring.
"""

from __future__ import annotations

import mmap
import os
import random
import select
import signal

from shm.memory.atomic_word import AtomicCounter
from shm.queues.doorbell import Doorbell
from shm.queues.ring import Ring, RingWriter
from shm.queues.settled_notifications import ALL_EVERY, SettledInterest, SettledNotifications
from tests.kit.memory import ring_region, spin_until

ROUNDS = 5_000
MISSED_AFTER_MS = 30_000
"""Long after the ring that it waits for would have come."""


class CountingBell(Doorbell):
    """Counts its rings."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.count = 0

    def ring(self) -> None:
        self.count += 1


class Fronts:
    """Three fronts' bells and words."""

    def __init__(self) -> None:
        words = memoryview(bytearray(24)).cast("Q")
        self.bells = [CountingBell() for _ in range(3)]
        self.cells = [AtomicCounter(words, 8 * front) for front in range(3)]
        self.news = SettledNotifications(list(zip(self.bells, self.cells, strict=True)))

    def rung(self) -> list[int]:
        """Take the number of rings of each bell since the last call."""
        counts = [bell.count for bell in self.bells]
        for bell in self.bells:
            bell.count = 0
        return counts


def append(writer: RingWriter, length: int) -> None:
    position = writer.try_claim(length)
    assert position is not None
    writer.write(position, length, 3, 0, 1, 9, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0)
    writer.commit()


def test_only_fronts_that_wait_are_rung() -> None:
    fronts = Fronts()
    with ring_region() as region:
        ring = Ring(region)
        assert not fronts.news.announce(ring, 0, 1)
        assert fronts.rung() == [1, 1, 1]  # nobody has said anything yet
        interests = [SettledInterest(cell) for cell in fronts.cells]
        assert not interests[0].show(False)
        assert not interests[2].show(False)
        fronts.news.announce(ring, 1, 2)
        assert fronts.rung() == [0, 1, 0]
        assert interests[2].show(True), "what settled before it was wanted is to be looked at"
        assert not interests[2].show(True)
        fronts.news.announce(ring, 2, 3)
        assert fronts.rung() == [0, 1, 1]


def test_a_crowded_ring_rings_every_front_because_a_worker_may_wait_for_their_cursors() -> None:
    fronts = Fronts()
    interests = [SettledInterest(cell) for cell in fronts.cells]
    with ring_region() as region:
        writer, ring = RingWriter(region), Ring(region)
        for interest in interests:
            interest.show(False)
        settled = 0
        while not ring.is_crowded():
            append(writer, writer.ring_bytes // 8)
            assert fronts.news.announce(ring, settled, settled + 1) is ring.is_crowded()
            settled += 1
        assert fronts.rung() == [1, 1, 1]


def test_every_front_is_rung_before_it_is_far_behind() -> None:
    fronts = Fronts()
    interests = [SettledInterest(cell) for cell in fronts.cells]
    with ring_region() as region:
        ring = Ring(region)
        for interest in interests:
            interest.show(False)
        settled, behind, rng = 0, 0, random.Random(7)
        for _ in range(500):
            count = rng.choice((1, 30, 400, 3000))
            fronts.news.announce(ring, settled, settled + count)
            settled, behind = settled + count, behind + count
            if fronts.rung()[0]:
                behind = 0
            assert behind < ALL_EVERY + 3000


def test_a_successor_of_a_front_is_rung_until_it_says_otherwise() -> None:
    fronts = Fronts()
    SettledInterest(fronts.cells[1]).show(False)
    SettledInterest(fronts.cells[1])
    with ring_region() as region:
        fronts.news.announce(Ring(region), 0, 1)
    assert fronts.rung()[1] == 1


def test_two_processes_never_both_miss_what_the_other_has_stored() -> None:
    """A flusher settles and a front begins to wait, at the same moment, again and again; one that
    both miss is never rung.
    """
    words = memoryview(mmap.mmap(-1, 4096)).cast("Q")
    settled, unwanted, seen, begun = (AtomicCounter(words, 64 * index) for index in range(4))
    bell = Doorbell.create()
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(300)
            _settle(settled, unwanted, seen, begun, bell)
            code = 0
        finally:
            os._exit(code)
    try:
        interest = SettledInterest(unwanted)
        poll, rng = select.poll(), random.Random(1)
        poll.register(bell.fd, select.POLLIN)
        for number in range(1, ROUNDS):
            interest.show(False)
            bell.clear()
            begun.store(number)
            for _ in range(rng.randrange(8)):
                pass
            if settled.load() < number and not (interest.show(True) and settled.load() >= number):
                while settled.load() < number:
                    assert poll.poll(MISSED_AFTER_MS), f"round {number}: settled, and not rung"
                    bell.clear()
            seen.store(number)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _settle(
    settled: AtomicCounter,
    unwanted: AtomicCounter,
    seen: AtomicCounter,
    begun: AtomicCounter,
    bell: Doorbell,
) -> None:
    """The flusher's process: the order of `Flusher._finish`."""
    news, rng = SettledNotifications([(bell, unwanted)]), random.Random(2)
    with ring_region() as region:
        ring = Ring(region)
        for number in range(1, ROUNDS):
            spin_until(begun, number)
            for _ in range(rng.randrange(8)):
                pass
            settled.store(number)
            news.announce(ring, 1, 1)
            spin_until(seen, number)
