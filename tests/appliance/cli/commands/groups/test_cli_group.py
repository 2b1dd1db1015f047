"""`tailrace group`: what it advises, what it would set, and what operators see and type, on a real
appliance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import pytest

from appliance.cli.commands.groups.advice import Advice, Sample, advise, lag_of, lag_text, span
from appliance.cli.commands.groups.new_offsets import Reset, Selection, new_offsets
from tailrace import Consumer, NewTopic, Producer, ShareConsumer
from tailrace.admin.admin import Admin
from tailrace.core.errors import PartitionOutOfRangeError, UnknownTopicError
from tailrace.core.records import OffsetAndMetadata
from tailrace.core.topic_partition import TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import on_terminal, run
from tests.kit.members.groups import poll_until


def group_at(
    at_s: float,
    committed: list[int],
    ends: list[int],
    members: int = 1,
    *,
    kind: str = "consumer",
    stored_s: float | None = None,
) -> Sample:
    """A group of which member n has partitions n, n + members, ..."""
    count = len(ends)
    owned = {
        f"m{m}": {"t": list(range(m, count, members))} if m < count else {} for m in range(members)
    }
    rows = [
        {"topic": "t", "partition": n, "committed": committed[n], "beginning": 0, "end": ends[n],
        "lag": ends[n] - committed[n] if committed[n] >= 0 else None,
         "lag_seconds": 5.0 if ends[n] > committed[n] else 0.0,
         "member_id": f"m{n % members}" if members else None,
         "committed_ms": None if stored_s is None else int(stored_s * 1000)}
        for n in range(count)
    ]  # fmt: skip
    described = [
        {
            "member_id": name,
            "client_id": "c",
            "instance_id": None,
            "owned": parts,
            "target": parts,
            "stuck": "",
        }
        for name, parts in owned.items()
    ]
    return Sample(at_s, {"group": "g", "kind": kind, "members": described, "partitions": rows})


def advised(first: Sample, last: Sample, by_s: float = 600.0) -> Advice:
    return advise([first, last], by_s)


def test_rates_are_what_moved_in_the_time_between() -> None:
    advice = advised(
        group_at(0, [0, 0], [1_000, 1_000], 2), group_at(10, [400, 600], [1_500, 1_500], 2)
    )
    assert (advice.arrival_per_s, advice.drain_per_s, advice.lag) == (100.0, 100.0, 2_000)
    assert advice.drained_in_s is None
    assert advice.lag_seconds == 5.0


def test_commits_that_come_in_steps_are_measured_from_commit_to_commit() -> None:
    """One each 4 s, of 400 records: 100 a second, whenever it is looked."""
    samples = [
        group_at(s, [400 * ((s + 3) // 4)], [10_000], stored_s=100 + (s + 3) // 4 * 4)
        for s in range(11)
    ]
    assert advise(samples, 600).drain_per_s == 100.0
    long_idle = [group_at(0, [0], [0], stored_s=1), group_at(10, [500], [500], stored_s=4_000)]
    assert advise(long_idle, 600).drain_per_s == 50.0, "an hour without work is not slowness"


def test_the_consumers_that_are_needed_drain_what_waits_and_what_comes() -> None:
    """Two drain 50/s each; 200/s arrive, 60,000 wait: 300/s are needed in ten minutes, six
    consumers.
    """
    advice = advised(
        group_at(0, [0] * 8, [7_500 - 250] * 8, 2), group_at(10, [125] * 8, [7_625 - 125] * 8, 2)
    )
    assert (round(advice.arrival_per_s), round(advice.drain_per_s), advice.lag) == (
        200,
        100,
        59_000,
    )
    assert (advice.consumers_needed, advice.partitions_needed) == (6, 8)
    assert "run 6 consumers (2 work now)" in " ".join(advice.sentences)
    assert "grows by 100.0 records/s" in advice.sentences[0]
    few = advised(group_at(0, [0] * 2, [30_000] * 2, 2), group_at(10, [500] * 2, [31_000] * 2, 2))
    assert few.consumers_needed == few.partitions_needed == 7  # 200 + 61,000 / 600 = 302 of 50 each
    assert "run 7 consumers on as many partitions. There are 2" in " ".join(few.sentences)
    share = advised(
        group_at(0, [0] * 2, [30_000] * 2, 2, kind="share"),
        group_at(10, [500] * 2, [31_000] * 2, 2, kind="share"),
    )
    assert (share.consumers_needed, share.partitions_needed) == (7, 2), (
        "a queue's partition has any number of consumers"
    )


def test_a_lag_that_shrinks_fast_enough_needs_no_more_consumers() -> None:
    advice = advised(
        group_at(0, [0, 0], [2_000, 2_000], 2), group_at(10, [500, 500], [2_000, 2_000], 2)
    )
    assert advice.drained_in_s == 30.0
    assert advice.consumers_needed is not None
    assert advice.consumers_needed <= 2
    assert advice.sentences == ["With these consumers the lag is drained in 30.0 s."]
    slow = advised(
        group_at(0, [0, 0], [2_000, 2_000], 2), group_at(10, [500, 500], [2_000, 2_000], 2), by_s=10
    )
    assert slow.consumers_needed == 6


def test_consumers_beyond_the_partitions_are_named_idle() -> None:
    advice = advised(group_at(0, [0, 0], [10, 10], 4), group_at(10, [10, 10], [10, 10], 4))
    assert advice.idle == ["c (m2)", "c (m3)"]
    assert advice.sentences == [
        "There is no lag: the consumers keep up.",
        (
            "2 of 4 consumers have nothing to do, for there are 2 partitions: c (m2), c (m3). Stop "
            "them, or add partitions."
        ),
    ]
    assert not advised(
        group_at(0, [0], [9], 3, kind="share"), group_at(5, [0], [9], 3, kind="share")
    ).idle


def test_a_group_that_stands_still_or_has_nobody_is_said_to_be_so() -> None:
    still = advised(group_at(0, [0], [10], 1), group_at(10, [0], [10], 1))
    assert still.consumers_needed is None
    assert "the consumers are stuck" in still.sentences[0]
    assert (
        "No consumer runs, and the lag is 10 records"
        in advised(group_at(0, [0], [10], 0), group_at(10, [0], [10], 0)).sentences[0]
    )
    assert (
        "nothing to advise" in advised(group_at(0, [], [], 0), group_at(10, [], [], 0)).sentences[0]
    )


def test_lag_is_said_to_be_unknown_where_nothing_is_committed() -> None:
    advice = advised(
        group_at(0, [-1, -1, -1], [9, 9, 0], 2), group_at(10, [-1, -1, -1], [9, 9, 0], 2)
    )
    assert (advice.lag, advice.partitions_without_commit) == (0, 2), (
        "an empty partition hides nothing"
    )
    assert not any("keep up" in sentence for sentence in advice.sentences)
    assert "In 2 of 3 partitions nothing is committed yet" in advice.sentences[0]
    group = group_at(0, [-1, -1], [9, 9]).group
    assert (lag_of(group), lag_text(group, None)) == (None, "not known: nothing is committed yet")
    group = group_at(0, [9, -1], [9, 9]).group
    assert (lag_of(group), lag_text(group, None)) == (
        0,
        "0 records; not known in 1 partition where nothing is committed yet",
    )
    group = group_at(0, [-1, 4], [0, 9]).group
    assert (lag_of(group), lag_text(group, 65.0)) == (5, "5 records, the oldest 1m 5s old")


def test_spans_are_readable() -> None:
    assert [span(s) for s in (1.5, 59.99, 90, 120, 3_700, 7_200, 200_000)] == [
        "1.5 s",
        "60.0 s",
        "1m 30s",
        "2m",
        "1h 1m",
        "2h",
        "2d 7h",
    ]


class FakeAdmin(Admin):
    """Topics a and b, with two partitions each, of offsets 10 to 20; a time is at offset 15 of a,
    and later than all of b.
    """

    def partition_counts(self, *, internal: bool = False) -> dict[str, int]:
        return {"a": 2, "b": 2}

    def offsets(self, requested: Any) -> dict[TopicPartition, dict[str, Any]]:
        places = {"earliest": 10, "latest": 20}
        return {
            key: {"topic": key.topic, "partition": key.partition, "code": 0, "beginning": 10,
            "end": 20,
                  "offset": places.get(at, 15 if key.topic == "a" else -1)}
            for key, at in requested.items()
        }  # fmt: skip


@pytest.fixture
def admin() -> Iterator[Admin]:
    with FakeAdmin("localhost:1") as made:
        yield made


COMMITTED: dict[TopicPartition, OffsetAndMetadata | None] = {
    TopicPartition("a", 0): OffsetAndMetadata(12),
    TopicPartition("b", 1): OffsetAndMetadata(18),
    TopicPartition("gone", 0): OffsetAndMetadata(3),
}


@pytest.mark.parametrize(
    ("reset", "offsets", "notes"),
    [
        (Reset("earliest"), [10, 10], 0), (Reset("latest"), [20, 20], 0),
        (Reset("2027"), [15, 20], 0), (Reset(shift_by=1), [13, 19], 0),
        (Reset(shift_by=-5), [10, 13], 1), (Reset(shift_by=3), [15, 20], 1),
        (Reset(to_offset=14), [14, 14], 0), (Reset(to_offset=0), [10, 10], 2),
        (Reset(to_offset=99), [20, 20], 2),
    ],
)  # fmt: skip
def test_each_way_to_reset_sets_what_it_says_within_the_log(
    admin: Admin, reset: Reset, offsets: list[int], notes: int
) -> None:
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
    with pytest.raises(PartitionOutOfRangeError, match="partition 2 does not exist"):
        new_offsets(admin, COMMITTED, Selection.parsed(["a:2"]), Reset("earliest"))
    with pytest.raises(click.ClickException, match="no committed offsets"):
        new_offsets(admin, {}, Selection({}), Reset("earliest"))
    with pytest.raises(click.UsageError, match="one of --to-earliest"):
        Reset.chosen(False, False, None, None, None)
    with pytest.raises(click.UsageError, match="only one of --to-earliest"):
        Reset.chosen(True, False, None, None, 5)


# ---- on a real appliance -------------------------------------------------------------------------


@pytest.fixture
def ten(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of two partitions with five records each, and a group of its name that has read two
    of the first one and all of the other.
    """
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic, 2))
        for number in range(10):
            producer.send(topic, b"v%d" % number, partition=number % 2)
        producer.flush()
        admin.alter_group_offsets(topic, {TopicPartition(topic, 0): 2, TopicPartition(topic, 1): 5})
    return topic


def committed(appliance: EmbeddedAppliance, group: str) -> list[int]:
    described = json.loads(run(appliance, "group", "describe", group, "--json").stdout)
    return [row["committed"] for row in described["partitions"]]


def test_groups_are_listed_and_described(appliance: EmbeddedAppliance, ten: str) -> None:
    listed = json.loads(run(appliance, "group", "list", "--json").stdout)
    assert [
        (row["kind"], row["state"], row["members"]) for row in listed if row["group"] == ten
    ] == [("consumer", "EMPTY", 0)]
    table = run(appliance, "group", "list").stdout.decode().splitlines()
    assert table[0].split() == ["GROUP", "KIND", "STATE", "MEMBERS", "ASSIGNOR"]
    assert any(line.startswith(ten) for line in table)
    described = json.loads(run(appliance, "group", "describe", ten, "--json").stdout)
    assert (
        described["lag"],
        described["idle_members"],
        described["stuck_members"],
        described["paused_topics"],
    ) == (3, [], [], [])
    assert [(row["lag"], row["lag_seconds"] > 0) for row in described["partitions"]] == [
        (3, True),
        (0, False),
    ]
    text = run(appliance, "group", "describe", ten).stdout.decode()
    assert "3 records, the oldest" in text
    assert "no members" in text
    assert f"{ten}          0          2    5    3" in text
    run(appliance, "topic", "alter", ten, "--config", "delivery.paused=true")
    assert f"paused   {ten}" in run(appliance, "group", "describe", ten).stdout.decode()
    assert "delivery.paused=false" in run(appliance, "topic", "describe", ten).stdout.decode()
    assert ten in json.loads(run(appliance, "status", "--json").stdout)["paused"]
    assert f"paused: {ten}" in run(appliance, "status").stdout.decode()
    run(appliance, "topic", "alter", ten, "--config", "delivery.paused=false")
    assert ten not in run(appliance, "status").stdout.decode()
    refused = run(appliance, "group", "describe", f"no-{ten}", status=1)
    assert b"UNKNOWN_GROUP" in refused.stderr
    assert b"tailrace group list" in refused.stderr


def test_offsets_are_reset_in_every_way_and_shown_before_that(
    appliance: EmbeddedAppliance, ten: str
) -> None:
    reset = ("group", "reset-offsets", ten)
    shown = run(appliance, *reset, "--to-earliest", "--dry-run")
    assert shown.stdout.decode().splitlines()[1].split() == [ten, "0", "2", "0", "5"]
    assert b"would set 2 offsets" in shown.stderr
    assert committed(appliance, ten) == [2, 5], "nothing was set"
    for options, requested in (
        (("--to-earliest", "--yes"), [0, 0]), (("--to-latest",), [5, 5]),
        (("--shift-by", "-3"), [2, 2]), (("--shift-by", "1", "--topic", f"{ten}:1"), [2, 3]),
        (("--to-offset", "4", "--topic", ten), [4, 4]), (("--to-datetime", "1h"), [0, 0]),
        (("--to-datetime", "2100-01-01T00:00:00Z"), [5, 5]),
    ):  # fmt: skip
        run(appliance, *reset, *options)
        assert committed(appliance, ten) == requested, options
    clamped = run(appliance, *reset, "--to-offset", "99", "--json")
    assert json.loads(clamped.stdout)["offsets"][0] == {
        "topic": ten,
        "partition": 0,
        "committed": 5,
        "new": 5,
        "end": 5,
    }
    assert "5 is used instead of 99" in clamped.stderr.decode()
    done = run(appliance, *reset, "--to-offset", "4")
    assert [line.split() for line in done.stdout.decode().splitlines()[1:]] == [
        [ten, "0", "5", "4", "5"],
        [ten, "1", "5", "4", "5"],
    ], "what was set is shown"
    run(appliance, "group", "reset-offsets", f"{ten}-new", "--to-earliest", "--topic", ten)
    assert committed(appliance, f"{ten}-new") == [0, 0], "a group that was not there is made"
    run(appliance, *reset, "--to-earliest", "--all-topics", "--execute")
    assert committed(appliance, ten) == [0, 0], "as kafka-consumer-groups.sh is told"
    assert (
        b"exclude each other"
        in run(appliance, *reset, "--to-earliest", "--all-topics", "--topic", ten, status=2).stderr
    )
    assert b"would set" in run(appliance, *reset, "--to-latest", "--dry-run", "--execute").stderr, (
        "the careful one counts"
    )
    assert b"one of --to-earliest" in run(appliance, *reset, status=2).stderr
    assert (
        b"UNKNOWN_GROUP"
        in run(appliance, "group", "reset-offsets", f"{ten}-none", "--to-earliest", status=1).stderr
    )
    assert (
        b"UNKNOWN_TOPIC"
        in run(appliance, *reset, "--to-earliest", "--topic", "none", status=1).stderr
    )


def test_a_terminal_is_asked_before_offsets_are_set_or_groups_deleted(
    appliance: EmbeddedAppliance, ten: str
) -> None:
    status, shown = on_terminal(
        appliance, "group", "reset-offsets", ten, "--to-earliest", typed="n\n", columns=200
    )
    assert status != 0
    assert f"Set 2 offsets of {ten}?" in shown
    assert committed(appliance, ten) == [2, 5]
    status, shown = on_terminal(appliance, "group", "delete", ten, typed="y\n", columns=200)
    assert (
        status,
        f"Delete {ten} with its 2 committed offsets?" in shown,
        f"deleted {ten}" in shown,
    ) == (0, True, True)
    assert b"UNKNOWN_GROUP" in run(appliance, "group", "delete", ten, status=1).stderr
    assert b"there is no group" in run(appliance, "group", "delete", ten, "--if-exists").stderr


def test_a_group_that_cannot_be_deleted_or_reset_says_who_is_in_it_and_keeps_no_other_from_it(
    appliance: EmbeddedAppliance, ten: str
) -> None:
    def worker(name: str, **settings: Any) -> Consumer:
        return Consumer(
            ten, bootstrap=appliance.address, group_id=name, client_id="worker", **settings
        )

    with Admin(appliance.address) as admin:
        admin.alter_group_offsets(f"{ten}-free", {TopicPartition(ten, 0): 1})
        with (
            worker(f"{ten}-busy") as busy,
            worker(f"{ten}-static", group_instance_id="w1") as static,
        ):
            poll_until(
                [busy, static],
                lambda: busy.assignment() and static.assignment(),
                "both are members",
            )
            static.close()
            done = run(
                appliance,
                "group",
                "delete",
                f"{ten}-busy",
                f"{ten}-static",
                f"{ten}-none",
                f"{ten}-free",
                "--json",
                status=1,
            )
            assert json.loads(done.stdout) == {
                "deleted": [f"{ten}-free"],
                "refused": [f"{ten}-busy", f"{ten}-static", f"{ten}-none"],
            }
            refusals = done.stderr.decode().splitlines()
            assert f"the group {ten}-busy has 1 member, 'worker'. Stop" in refusals[0]
            assert (
                "1 member, 'w1' (gone; its place is kept for its session_timeout_ms, 45000 ms)"
                in refusals[1]
            )
            assert "UNKNOWN_GROUP" in refusals[2]
            refused = run(
                appliance,
                "group",
                "reset-offsets",
                f"{ten}-busy",
                "--to-earliest",
                "--topic",
                ten,
                status=1,
            )
            assert b"has 1 member, 'worker'; none of its offsets were changed" in refused.stderr
            assert not refused.stdout, "what was not set is not shown"
        with ShareConsumer(
            ten, bootstrap=appliance.address, group_id=f"{ten}-share", client_id="hand"
        ) as hand:
            hand.poll(10)
            assert (
                b"has 1 member, 'hand'"
                in run(appliance, "group", "delete", f"{ten}-share", status=1).stderr
            )


def test_advice_on_a_group_that_nobody_is_in(appliance: EmbeddedAppliance, ten: str) -> None:
    advice = json.loads(
        run(appliance, "group", "advise", ten, "--seconds", "1", "--by", "5m", "--json").stdout
    )
    assert (advice["lag"], advice["consumers"], advice["drained_in_s"], advice["by_s"]) == (
        3,
        0,
        None,
        300.0,
    )
    text = run(appliance, "group", "advise", ten, "--seconds", "1").stdout.decode()
    assert "No consumer runs, and the lag is 3 records." in text


def test_more_partitions_say_what_becomes_of_the_order_of_keys(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    slotted = f"{topic}-slots"
    run(appliance, "topic", "create", topic)
    run(appliance, "topic", "create", slotted, "--config", "partitioner=hash_slots")
    said = run(appliance, "topic", "alter", topic, "--partitions", "2")
    assert (
        b"in order within each partition only. A topic made with --config partitioner=hash_slots "
        b"keeps the order" in said.stderr
    )
    assert (
        b"partitioner" not in run(appliance, "topic", "alter", slotted, "--partitions", "2").stderr
    )
    assert (
        b"partitioner"
        not in run(appliance, "topic", "alter", topic, "--config", "segment.ms=60000").stderr
    )
