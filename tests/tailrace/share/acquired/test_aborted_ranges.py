"""Acquired ranges over a log with transactions: each offset is returned once, with its committed
record or as an offset without one.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_json, run_on
from tailrace.share.acquired.fetch_loop import ShareFetchLoop
from tailrace.share.requests import Acquired
from tests.kit.batches import TOPIC_ID
from tests.kit.log_files.file_fronts import FileFront
from tests.kit.log_files.transaction_logs import grow
from tests.kit.matrices import short

NEVER_NS = 1 << 62
STEPS_MAX = 5_000


class Member:
    """A member that reads what it has acquired."""

    def __init__(self, world: FileFront) -> None:
        self.world = world
        self.connection = Connection("tcp://127.0.0.1:1", "share", world.runtime())
        settings = ConsumerSettings(fetch_max_wait_ms=10, max_partition_fetch_bytes=4096)
        self.loop = ShareFetchLoop(
            self.connection,
            settings,
            lambda api, request: call_json(self.connection, api, request, 1000),
        )
        run_on(self.connection, self.loop.lookup(["t"]))
        self.number = 0
        self.records: list[int] = []
        self.gaps: list[int] = []

    def acquire(self, runs: list[tuple[int, int]]) -> None:
        self.number += 1
        self.loop.acquired(
            self.number,
            [Acquired(TOPIC_ID.hex(), 0, first, last, 1, False, NEVER_NS) for first, last in runs],
        )

    def read(self) -> int:
        """Read all of it. Returns the number of steps."""
        for count in range(STEPS_MAX):
            self.loop.fetch()
            for _, _, piece in self.loop.pieces(1000):
                assert piece.unreadable is None
                if piece.records:
                    self.records += [record.offset for record in piece.records]
                else:
                    self.gaps += range(piece.first, piece.last + 1)
                piece.run.first = piece.last + 1
            for acquired_ranges in self.loop.broken():
                run_on(self.connection, self.loop.repair(acquired_ranges))
            if not self.loop.has_ranges:
                return count
            self.world.step(5)
        raise AssertionError("it never ends")


@pytest.mark.parametrize("seed", short(range(16), *range(6)))
def test_each_acquired_offset_has_its_committed_record_or_none(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    world = FileFront(tmp_path)
    log = world.logs[0]
    member = Member(world)
    next_offset = 0
    given: list[int] = []
    for _ in range(12):
        for _ in range(rng.randrange(12)):
            grow(rng, log)
        end = log.state.last_stable_offset
        runs: list[tuple[int, int]] = []
        while next_offset < end and len(runs) < 4:
            last = min(end - 1, next_offset + rng.randrange(8))
            if rng.random() < 0.7:  # the others are another member's
                runs.append((next_offset, last))
                given += range(next_offset, last + 1)
            next_offset = last + 1
        member.acquire(runs)
        member.read()
        if rng.random() < 0.3 and next_offset == end:
            member.loop.wait_at([(TOPIC_ID.hex(), 0, next_offset)])
            member.loop.fetch()
    committed = {offset for offset, _ in log.committed()}
    assert sorted(member.records + member.gaps) == given
    assert member.records == [offset for offset in given if offset in committed]


def test_a_log_full_of_aborted_records_is_a_gap_read_in_few_steps(tmp_path: Path) -> None:
    world = FileFront(tmp_path)
    log = world.logs[0]
    member = Member(world)
    for number in range(50):
        log.append(20, (1, number), value_bytes=100, publish=False)
        log.end((1, number), commit=False, publish=number == 49)
    end = log.state.last_stable_offset
    member.acquire([(0, end - 1)])
    assert member.read() < 60
    assert (member.records, member.gaps) == ([], list(range(end)))


def test_a_member_that_waits_at_the_end_hears_of_aborted_offsets_too(tmp_path: Path) -> None:
    world = FileFront(tmp_path)
    log = world.logs[0]
    member = Member(world)
    member.loop.wait_at([(TOPIC_ID.hex(), 0, 0)])
    member.loop.fetch()
    log.append(3, (1, 0))
    log.append(3, (1, 0))
    world.settled()
    member.loop.fetch()
    assert member.loop.check_ends() is False
    log.end((1, 0), commit=False)
    world.settled()
    for _ in range(50):
        member.loop.fetch()
        if member.loop.check_ends():
            break
        world.step(20)
    member.acquire([(0, 6)])
    member.read()
    assert (member.records, member.gaps) == ([], list(range(7)))
