"""`tailrace group`: what it advises, what it would set, and what operators see and type, on a real appliance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import pytest

from appliance.cli.group_advice import Advice, Sample, advise, span
from appliance.cli.group_reset import Reset, Selection, new_offsets
from tailrace.admin import Admin
from tailrace.errors import PartitionOutOfRangeError, UnknownTopicError
from tailrace.group_admin import CommittedOffset
from tailrace.records import TopicPartition


def group_at(
    at_s: float, committed: list[int], ends: list[int], members: int = 1, *, kind: str = "consumer", stored_s: float | None = None
) -> Sample:
    """A group of which member n has partitions n, n + members, ..."""
    count = len(ends)
    owned = {f"m{m}": {"t": list(range(m, count, members))} if m < count else {} for m in range(members)}
    rows = [
        {"topic": "t", "partition": n, "committed": committed[n], "beginning": 0, "end": ends[n], "lag": ends[n] - committed[n] if committed[n] >= 0 else None,
         "lag_seconds": 5.0 if ends[n] > committed[n] else 0.0, "member_id": f"m{n % members}" if members else None,
         "committed_ms": None if stored_s is None else int(stored_s * 1000)}
        for n in range(count)
    ]  # fmt: skip
    described = [
        {"member_id": name, "client_id": "c", "instance_id": None, "owned": parts, "target": parts, "stuck": ""}
        for name, parts in owned.items()
    ]
    return Sample(at_s, {"group": "g", "kind": kind, "members": described, "partitions": rows})


def advised(first: Sample, last: Sample, by_s: float = 600.0) -> Advice:
    return advise([first, last], by_s)


def test_rates_are_what_moved_in_the_time_between() -> None:
    advice = advised(group_at(0, [0, 0], [1_000, 1_000], 2), group_at(10, [400, 600], [1_500, 1_500], 2))
    assert (advice.arrival_per_s, advice.drain_per_s, advice.lag) == (100.0, 100.0, 2_000)
    assert advice.drained_in_s is None
    assert advice.lag_seconds == 5.0


def test_commits_that_come_in_steps_are_measured_from_commit_to_commit() -> None:
    """One each 4 s, of 400 records: 100 a second, whenever it is looked."""
    samples = [group_at(s, [400 * ((s + 3) // 4)], [10_000], stored_s=100 + (s + 3) // 4 * 4) for s in range(11)]
    assert advise(samples, 600).drain_per_s == 100.0
    long_idle = [group_at(0, [0], [0], stored_s=1), group_at(10, [500], [500], stored_s=4_000)]
    assert advise(long_idle, 600).drain_per_s == 50.0, "an hour without work is not slowness"


def test_the_consumers_that_are_needed_drain_what_waits_and_what_comes() -> None:
    """Two drain 50/s each; 200/s arrive, 60,000 wait: 300/s are needed in ten minutes, six consumers."""
    advice = advised(group_at(0, [0] * 8, [7_500 - 250] * 8, 2), group_at(10, [125] * 8, [7_625 - 125] * 8, 2))
    assert (round(advice.arrival_per_s), round(advice.drain_per_s), advice.lag) == (200, 100, 59_000)
    assert (advice.consumers_needed, advice.partitions_needed) == (6, 8)
    assert "run 6 consumers (2 work now)" in " ".join(advice.sentences)
    assert "grows by 100.0 records/s" in advice.sentences[0]
    few = advised(group_at(0, [0] * 2, [30_000] * 2, 2), group_at(10, [500] * 2, [31_000] * 2, 2))
    assert few.consumers_needed == few.partitions_needed == 7  # 200 + 61,000 / 600 = 302 of 50 each
    assert "run 7 consumers on as many partitions: there are 2" in " ".join(few.sentences)
    share = advised(group_at(0, [0] * 2, [30_000] * 2, 2, kind="share"), group_at(10, [500] * 2, [31_000] * 2, 2, kind="share"))
    assert (share.consumers_needed, share.partitions_needed) == (7, 2), "a queue's partition has any number of consumers"


def test_a_lag_that_shrinks_fast_enough_needs_no_more_consumers() -> None:
    advice = advised(group_at(0, [0, 0], [2_000, 2_000], 2), group_at(10, [500, 500], [2_000, 2_000], 2))
    assert advice.drained_in_s == 30.0
    assert advice.consumers_needed is not None
    assert advice.consumers_needed <= 2
    assert advice.sentences == ["As it is, the lag is drained in 30.0 s."]
    slow = advised(group_at(0, [0, 0], [2_000, 2_000], 2), group_at(10, [500, 500], [2_000, 2_000], 2), by_s=10)
    assert slow.consumers_needed == 6


def test_consumers_beyond_the_partitions_are_named_idle() -> None:
    advice = advised(group_at(0, [0, 0], [10, 10], 4), group_at(10, [10, 10], [10, 10], 4))
    assert advice.idle == ["c (m2)", "c (m3)"]
    assert advice.sentences == [
        "There is no lag: the consumers keep up.",
        "2 of 4 consumers have nothing to do, since there are 2 partitions: c (m2), c (m3). Stop them, or add partitions.",
    ]
    assert not advised(group_at(0, [0], [9], 3, kind="share"), group_at(5, [0], [9], 3, kind="share")).idle


def test_a_group_that_stands_still_or_has_nobody_is_said_to_be_so() -> None:
    still = advised(group_at(0, [0], [10], 1), group_at(10, [0], [10], 1))
    assert still.consumers_needed is None
    assert "stand still" in still.sentences[0]
    assert "No consumer runs: 10 records wait" in advised(group_at(0, [0], [10], 0), group_at(10, [0], [10], 0)).sentences[0]
    assert "nothing to advise" in advised(group_at(0, [], [], 0), group_at(10, [], [], 0)).sentences[0]


def test_spans_are_readable() -> None:
    assert [span(s) for s in (1.5, 59.99, 90, 120, 3_700, 7_200, 200_000)] == ["1.5 s", "60.0 s", "1m 30s", "2m", "1h 1m", "2h", "2d 7h"]


class FakeAdmin(Admin):
    """Topics a and b, with two partitions each, of offsets 10 to 20; a time is at offset 15 of a, and later than all of b."""

    def partition_counts(self) -> dict[str, int]:
        return {"a": 2, "b": 2}

    def offsets(self, wanted: Any) -> dict[TopicPartition, dict[str, Any]]:
        places = {"earliest": 10, "latest": 20}
        return {
            key: {"topic": key.topic, "partition": key.partition, "code": 0, "beginning": 10, "end": 20,
                  "offset": places.get(at, 15 if key.topic == "a" else -1)}
            for key, at in wanted.items()
        }  # fmt: skip


@pytest.fixture
def admin() -> Iterator[Admin]:
    with FakeAdmin("localhost:1") as made:
        yield made


COMMITTED: dict[TopicPartition, CommittedOffset | None] = {
    TopicPartition("a", 0): CommittedOffset(12),
    TopicPartition("b", 1): CommittedOffset(18),
    TopicPartition("gone", 0): CommittedOffset(3),
}


@pytest.mark.parametrize(
    ("reset", "offsets", "notes"),
    [
        (Reset("earliest"), [10, 10], 0), (Reset("latest"), [20, 20], 0), (Reset("2027"), [15, 20], 0), (Reset(shift_by=1), [13, 19], 0),
        (Reset(shift_by=-5), [10, 13], 1), (Reset(shift_by=3), [15, 20], 1), (Reset(to_offset=14), [14, 14], 0), (Reset(to_offset=0), [10, 10], 2),
        (Reset(to_offset=99), [20, 20], 2),
    ],
)  # fmt: skip
def test_each_way_to_reset_sets_what_it_says_within_the_log(admin: Admin, reset: Reset, offsets: list[int], notes: int) -> None:
    found = new_offsets(admin, COMMITTED, Selection({}), reset)
    assert [(key, change.offset) for key, change in found.changes.items()] == [
        (TopicPartition("a", 0), offsets[0]),
        (TopicPartition("b", 1), offsets[1]),
    ]
    assert [change.committed for change in found.changes.values()] == [12, 18]
    assert "gone is left out" in found.notes[0]
    assert len(found.notes) == 1 + notes


def test_a_selection_names_topics_and_partitions(admin: Admin) -> None:
    assert Selection.parsed(["a:0,1", "b", "a:1", "b:0"]).topics == {"a": [0, 1, 1], "b": None}
    found = new_offsets(admin, COMMITTED, Selection.parsed(["a"]), Reset("earliest"))
    assert list(found.changes) == [TopicPartition("a", 0), TopicPartition("a", 1)]
    shifted = new_offsets(admin, COMMITTED, Selection.parsed(["a"]), Reset(shift_by=1))
    assert list(shifted.changes) == [TopicPartition("a", 0)]
    assert "a-1 is left out" in shifted.notes[0]
    for text in ("a:", ":1", "a:x", "a:1,,2", "a:-1"):
        with pytest.raises(click.UsageError, match="TOPIC:0,1"):
            Selection.parsed([text])
    with pytest.raises(UnknownTopicError):
        new_offsets(admin, COMMITTED, Selection.parsed(["c"]), Reset("earliest"))
    with pytest.raises(PartitionOutOfRangeError, match="none 2"):
        new_offsets(admin, COMMITTED, Selection.parsed(["a:2"]), Reset("earliest"))
    with pytest.raises(click.ClickException, match="committed nothing"):
        new_offsets(admin, {}, Selection({}), Reset("earliest"))
    with pytest.raises(click.UsageError, match="say where to"):
        Reset.chosen(False, False, None, None, None)
    with pytest.raises(click.UsageError, match="say where to"):
        Reset.chosen(True, False, None, None, 5)
