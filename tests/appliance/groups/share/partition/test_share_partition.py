"""The state of a share partition: by hand where a rule is shown, against a plain model of one entry
per record where all of them meet.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from appliance.groups.share.partition import codec
from appliance.groups.share.partition.offset_ranges import (
    ACKNOWLEDGED,
    ARCHIVED,
    Kind,
    OffsetRanges,
    State,
)
from appliance.groups.share.partition.share_partition import LOCK_TICK_NS, Acquired, SharePartition
from tests.kit.matrices import short

LOCK_NS = 20 * LOCK_TICK_NS
LIMIT, LOCKS_MAX = 3, 50


def acquire(
    partition: SharePartition,
    member: str,
    count: int,
    end: int = 1_000,
    now_ns: int = 0,
    locks_max: int = 2_000,
) -> list[Acquired]:
    return partition.acquire(member, count, end, LIMIT, locks_max, now_ns, LOCK_NS)


def acknowledge(
    partition: SharePartition, member: str, first: int, last: int, outcome: str, now_ns: int = 0
) -> list[tuple[int, int]]:
    return partition.acknowledge(member, first, last, outcome, now_ns, LOCK_NS)


def test_members_of_one_partition_get_records_of_their_own() -> None:
    partition = SharePartition.starting_at(10)
    assert acquire(partition, "a", 5) == [Acquired(10, 14, 1, False)]
    assert acquire(partition, "b", 5) == [Acquired(15, 19, 1, False)]
    assert acquire(partition, "a", 5, end=22) == [Acquired(20, 21, 1, False)]
    assert acquire(partition, "b", 5, end=22) == []
    assert acknowledge(partition, "b", 15, 19, "accept") == []
    assert partition.start_offset == 10
    assert acknowledge(partition, "a", 10, 14, "accept") == []
    assert partition.start_offset == 20


def test_a_released_record_comes_again_with_a_higher_count_and_at_the_limit_it_is_dead() -> None:
    partition = SharePartition.starting_at(0)
    for count in range(1, LIMIT + 1):
        assert acquire(partition, "a", 1, end=1) == [Acquired(0, 0, count, False)]
        assert acknowledge(partition, "a", 0, 0, "release") == []
    assert acquire(partition, "a", 1, end=1) == [Acquired(0, 0, LIMIT, True)]
    assert partition.expire(2 * LOCK_NS) == 1
    assert acquire(partition, "b", 1, end=1, now_ns=2 * LOCK_NS) == [Acquired(0, 0, LIMIT, True)]
    assert acknowledge(partition, "b", 0, 0, "accept") == []
    assert (partition.start_offset, len(partition.spans)) == (1, 0)


def test_what_no_program_was_given_has_no_delivery_while_its_lock_lasts_and_when_it_has_passed() -> (  # noqa: E501
    None
):
    partition = SharePartition.starting_at(0)
    acquire(partition, "a", 4)
    assert acknowledge(partition, "a", 0, 1, "unread") == []
    assert acquire(partition, "b", 1) == [Acquired(0, 0, 1, False)], "as if nobody had had it"
    assert partition.expire(2 * LOCK_NS) == 3
    assert acquire(partition, "b", 2, now_ns=2 * LOCK_NS) == [
        Acquired(0, 0, 2, False),
        Acquired(1, 1, 1, False),
    ]
    assert acknowledge(partition, "a", 2, 3, "unread", 2 * LOCK_NS) == [], (
        "too late is in time: nothing is lost"
    )
    assert acquire(partition, "b", 2, end=4, now_ns=2 * LOCK_NS) == [Acquired(2, 3, 1, False)]
    assert partition.expire(4 * LOCK_NS) == 4
    assert acquire(partition, "c", 1, now_ns=4 * LOCK_NS) == [Acquired(0, 0, 3, False)]
    assert acknowledge(partition, "b", 0, 0, "unread", 4 * LOCK_NS) == []
    assert acknowledge(partition, "c", 0, 0, "accept", 4 * LOCK_NS) == [], "it keeps its lock"
    assert acknowledge(partition, "a", 0, 0, "unread") == [], "what is done stays done"
    assert partition.start_offset == 1
    partition.spans._check_invariants()


def test_a_limit_that_is_raised_lets_a_dead_record_be_delivered_again() -> None:
    partition = SharePartition.starting_at(0)
    for _ in range(LIMIT):
        acquire(partition, "a", 1)
        acknowledge(partition, "a", 0, 0, "release")
    assert partition.acquire("a", 1, 1, LIMIT + 1, 10, 0, LOCK_NS) == [
        Acquired(0, 0, LIMIT + 1, False)
    ]


def test_a_late_acknowledgement_changes_nothing_and_is_told() -> None:
    partition = SharePartition.starting_at(0)
    acquire(partition, "a", 10)
    acknowledge(partition, "a", 0, 1, "accept")
    assert partition.next_deadline_ns() == LOCK_NS
    assert partition.expire(LOCK_NS - 1) == 0
    assert partition.expire(LOCK_NS) == 8
    assert acquire(partition, "b", 3) == [Acquired(2, 4, 2, False)]
    assert acknowledge(partition, "a", 0, 12, "accept", LOCK_NS) == [(0, 12)]
    assert acknowledge(partition, "b", 1, 5, "accept", LOCK_NS) == [(1, 1), (5, 5)]
    assert partition.start_offset == 5


def test_an_expired_lock_is_lost_only_when_the_timer_has_run() -> None:
    """Nobody else has the record: what its member says still counts."""
    partition = SharePartition.starting_at(0)
    acquire(partition, "a", 1)
    assert acknowledge(partition, "a", 0, 0, "accept", 2 * LOCK_NS) == []


def test_renewed_locks_last_longer() -> None:
    partition = SharePartition.starting_at(0)
    acquire(partition, "a", 10)
    assert acknowledge(partition, "a", 3, 4, "renew", LOCK_TICK_NS) == []
    assert partition.expire(LOCK_NS) == 8
    assert partition.expire(LOCK_NS + LOCK_TICK_NS) == 2
    assert partition.next_deadline_ns() is None


def test_a_slow_record_does_not_hold_the_partition_back() -> None:
    partition = SharePartition.starting_at(0)
    acquire(partition, "slow", 1, locks_max=10)
    for first in range(1, 901, 9):
        assert acquire(partition, "quick", 100, locks_max=10) == [
            Acquired(first, first + 8, 1, False)
        ]
        assert acquire(partition, "quick", 1, locks_max=10) == []
        acknowledge(partition, "quick", first, first + 8, "accept")
    assert (partition.start_offset, len(partition.spans)) == (0, 2)
    acknowledge(partition, "slow", 0, 0, "accept")
    assert partition.start_offset == 901


def test_one_by_one_is_as_good_as_at_once() -> None:
    """50,000 records acquired 500 at a time and accepted one by one, in any order within the 500:
    the state stays a few spans, and ends empty.
    """
    partition = SharePartition.starting_at(0)
    order = random.Random(1)
    for first in range(0, 50_000, 500):
        assert acquire(partition, "a", 500, end=50_000) == [Acquired(first, first + 499, 1, False)]
        offsets = list(range(first, first + 500))
        if first % 1_000:
            order.shuffle(offsets)
        for offset in offsets:
            assert acknowledge(partition, "a", offset, offset, "accept") == []
        assert len(partition.spans) == 0
    assert partition.start_offset == 50_000


@pytest.mark.parametrize("count", short([100_000, 1_000_000]))
def test_any_number_of_outcomes_in_turn_behind_one_locked_record_leave_a_few_spans(
    count: int,
) -> None:
    partition = SharePartition.starting_at(0)
    acquire(partition, "slow", 1)
    most = largest = now_ns = 0
    for first in range(1, count, 500):
        now_ns += LOCK_TICK_NS // 10
        acquire(partition, "quick", 500, end=count + 500, now_ns=now_ns)
        for offset in range(first, first + 500, 2):
            acknowledge(partition, "quick", offset, offset, "accept", now_ns)
            acknowledge(partition, "quick", offset + 1, offset + 1, "reject", now_ns)
        most, largest = (
            max(most, len(partition.spans)),
            max(largest, len(codec.encode(partition.spans))),
        )
        acknowledge(partition, "slow", 0, 0, "renew", now_ns)
        partition.expire(now_ns)
        assert len(partition._deadlines) <= LOCK_NS // LOCK_TICK_NS + 2
    assert most <= 2
    assert largest < 64


def test_a_state_of_many_outcomes_that_an_earlier_program_stored_is_merged_when_it_is_read() -> (
    None
):
    spans = OffsetRanges(0)
    spans.append(1, State(Kind.ACQUIRED, 1, "slow"))
    for _ in range(1_000):
        spans.append(1, ACKNOWLEDGED)
        spans.append(1, ARCHIVED)
    partition = SharePartition(codec.decode(codec.encode(spans)))
    partition.spans._check_invariants()
    assert (partition.start_offset, partition.next_offset, len(partition.spans)) == (0, 2_001, 2)


@pytest.mark.parametrize("seed", range(5))
def test_there_are_at_most_two_spans_for_each_record_in_flight(seed: int) -> None:
    chance = random.Random(seed)
    partition, end = SharePartition.starting_at(0), 0
    for _ in range(4_000):
        end += chance.randrange(40)
        acquire(partition, chance.choice("abc"), chance.randrange(1, 40), end, locks_max=100)
        first = chance.randrange(partition.start_offset, partition.next_offset + 1)
        outcome = chance.choice(["accept", "reject", "release", "renew"])
        acknowledge(partition, chance.choice("abc"), first, first + chance.randrange(9), outcome)
        partition.spans._check_invariants()
        assert len(partition.spans) <= 2 * partition.spans.in_flight_count
        assert partition.spans.acquired_count or not partition._deadlines


def test_deadlines_of_locks_that_were_given_up_in_time_are_forgotten() -> None:
    partition = SharePartition.starting_at(0)
    for first in range(10_000):
        acquire(partition, "a", 1, end=10_000, now_ns=first * LOCK_TICK_NS)
        acknowledge(partition, "a", first, first, "accept", first * LOCK_TICK_NS)
        assert not partition._deadlines


def test_retention_takes_records_that_are_acquired() -> None:
    partition = SharePartition.starting_at(0)
    acquire(partition, "a", 10)
    assert partition.follow_log(5, 100)
    assert not partition.follow_log(5, 100)
    assert partition.start_offset == 5
    assert partition.follow_log(50, 100)
    assert acquire(partition, "a", 1) == [Acquired(50, 50, 1, False)]


def test_a_log_that_lost_its_end_gives_the_offsets_again() -> None:
    partition = SharePartition.starting_at(0)
    acquire(partition, "a", 10)
    acknowledge(partition, "a", 0, 7, "accept")
    assert partition.follow_log(0, 9)
    assert (partition.start_offset, partition.next_offset) == (8, 9)
    assert partition.follow_log(0, 4)
    assert acquire(partition, "b", 2) == [Acquired(4, 5, 1, False)]


@dataclass
class One:
    """A record in the model."""

    kind: Kind
    count: int = 0
    member: str = ""
    until_ns: int = 0


class Model:
    """A record each: slow and plain."""

    def __init__(self) -> None:
        self.records: dict[int, One] = {}
        self.next = 0

    def acquire(
        self, member: str, count: int, end: int, now_ns: int
    ) -> list[tuple[int, int, bool]]:
        given: list[tuple[int, int, bool]] = []
        for offset in sorted(self.records):
            record = self.records[offset]
            if record.kind is Kind.AVAILABLE and len(given) < count:
                is_dead = record.count >= LIMIT
                record.kind, record.member, record.until_ns = Kind.ACQUIRED, member, until(now_ns)
                record.count += not is_dead
                given.append((offset, record.count, is_dead))
        in_flight = sum(
            record.kind in (Kind.AVAILABLE, Kind.ACQUIRED) for record in self.records.values()
        )
        while len(given) < count and self.next < end and in_flight < LOCKS_MAX:
            self.records[self.next] = One(Kind.ACQUIRED, 1, member, until(now_ns))
            given.append((self.next, 1, False))
            self.next += 1
            in_flight += 1
        return given

    def acknowledge(
        self, member: str, first: int, last: int, outcome: str, now_ns: int
    ) -> set[int]:
        lost = set()
        for offset in range(first, last + 1):
            record = self.records.get(offset)
            if record is None or record.kind is not Kind.ACQUIRED or record.member != member:
                lost.add(offset)
            elif outcome == "release":
                self.records[offset] = One(Kind.AVAILABLE, record.count)
            elif outcome == "renew":
                record.until_ns = until(now_ns)
            else:
                self.records[offset] = One(Kind.ACKNOWLEDGED)
        return lost

    def free(self, now_ns: int = -1, member: str = "") -> None:
        for offset, record in self.records.items():
            if record.kind is Kind.ACQUIRED and (
                record.until_ns <= now_ns or record.member == member
            ):
                self.records[offset] = One(Kind.AVAILABLE, record.count)

    def extend_locks(self, now_ns: int) -> None:
        for record in self.records.values():
            if record.kind is Kind.ACQUIRED:
                record.until_ns = until(now_ns)

    def copy(self) -> Model:
        other = Model()
        other.records = {
            offset: One(r.kind, r.count, r.member, r.until_ns) for offset, r in self.records.items()
        }
        other.next = self.next
        return other


def until(now_ns: int) -> int:
    return -(-(now_ns + LOCK_NS) // LOCK_TICK_NS) * LOCK_TICK_NS


def check(partition: SharePartition, model: Model) -> None:
    partition.spans._check_invariants()
    assert partition.next_offset == model.next
    start = partition.start_offset
    assert all(
        record.kind is Kind.ACKNOWLEDGED
        for offset, record in model.records.items()
        if offset < start
    )
    found = {
        offset: span.state
        for span in partition.spans
        for offset in range(span.first, span.last + 1)
    }
    for offset, record in model.records.items():
        if offset >= start:
            assert found[offset] == (record.kind, record.count, record.member, record.until_ns)


@pytest.mark.parametrize("seed", short(range(40), *range(12)))
def test_any_order_of_requests_restarts_and_rollbacks_is_as_the_model_says(seed: int) -> None:
    chance = random.Random(seed)
    partition, model = SharePartition.starting_at(0), Model()
    stored, stored_model = codec.encode(partition.spans), model.copy()
    now_ns, end = 0, 0
    members = ["a", "b", "c"]
    for _ in range(400):
        step = chance.randrange(12)
        member = chance.choice(members)
        if step < 3:
            end += chance.randrange(8)
            count = chance.randrange(1, 12)
            given = partition.acquire(member, count, end, LIMIT, LOCKS_MAX, now_ns, LOCK_NS)
            flat = [
                (offset, each.delivery_count, each.is_dead)
                for each in given
                for offset in range(each.first, each.last + 1)
            ]
            assert flat == model.acquire(member, count, end, now_ns)
        elif step < 8:
            first = chance.randrange(max(0, partition.start_offset - 3), model.next + 3)
            last = first + chance.randrange(6)
            outcome = chance.choice(["accept", "accept", "accept", "release", "reject", "renew"])
            lost = partition.acknowledge(member, first, last, outcome, now_ns, LOCK_NS)
            assert all(run[0] <= run[1] for run in lost)
            assert {
                offset for run in lost for offset in range(run[0], run[1] + 1)
            } == model.acknowledge(member, first, last, outcome, now_ns)
        elif step == 8:
            now_ns += chance.randrange(LOCK_NS)
            partition.expire(now_ns)
            model.free(now_ns=now_ns)
        elif step == 9:
            partition.release_member(member)
            model.free(member=member)
        elif step == 10:  # the step is committed
            stored, stored_model = codec.encode(partition.spans), model.copy()
        else:  # a start, or a commit that failed: what is on the disk is what there is
            partition, model = SharePartition(codec.decode(stored)), stored_model.copy()
            end = max(end, model.next)
            partition.extend_locks(now_ns, LOCK_NS)
            model.extend_locks(now_ns)
        check(partition, model)
        deadline_ns = partition.next_deadline_ns()
        locked = [
            record.until_ns for record in model.records.values() if record.kind is Kind.ACQUIRED
        ]
        assert not locked or (deadline_ns is not None and deadline_ns <= min(locked))
    for _ in range(1_000):  # what is left is drained: each record ends accepted or dead, once
        now_ns += 2 * LOCK_NS
        partition.expire(now_ns)
        given = partition.acquire("z", 7, end, LIMIT, LOCKS_MAX, now_ns, LOCK_NS)
        if not given:
            break
        for each in given:
            assert (
                partition.acknowledge("z", each.first, each.last, "accept", now_ns, LOCK_NS) == []
            )
    assert partition.start_offset == end
