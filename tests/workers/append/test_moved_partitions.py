"""Transactions at the former worker of a partition that has moved."""

from __future__ import annotations

import dataclasses

from tests.kit.log_files.logs import assignment
from tests.kit.stepped.coordinator import (
    COMMIT,
    PID,
    Coordinator,
    ends_of,
    make_bench,
    results,
    transactional,
)


def test_a_restarted_former_worker_keeps_a_commit_from_being_forgotten_until_its_slot_ends() -> (
    None
):
    """The new worker may be down, and open the partition when the decision is no longer known."""
    it = make_bench(2)
    coordinator = Coordinator(it)
    coordinator.decide(1, [], [(PID, 0)])
    coordinator.feed()
    coordinator.settle()
    assert results(it, transactional()) == [0]
    closed = dataclasses.replace(assignment(version=2), departing="/other", move="this")
    it.assign(closed)
    coordinator.settle()
    it.kill_worker()  # it is fed the former place, closed
    coordinator.settle()
    ordinal = coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)], is_sent=False)
    coordinator.feed()
    coordinator.settle()
    assert ordinal in coordinator.settled.unfinished
    assert ordinal in coordinator.rows
    assert ends_of(it) == [], "nothing is appended in the former place"
    it.assign(dataclasses.replace(closed, departing="", move="", dropped=True, version=3))
    coordinator.settle()
    it.now_ns += 1_000_000_000
    coordinator.settle()
    assert coordinator.rows == {}
