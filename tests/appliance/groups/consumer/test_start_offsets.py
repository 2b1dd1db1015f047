"""Start of a group in a partition without a commit: at the beginning, if the partition was added
while the group was there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench, Client, FakeTopics, settle

NOT_COMMITTED = -1


def grow(bench: Bench, topic: str, count: int) -> None:
    bench.topics.grow(topic, count)
    bench.service.topics_changed(bench.now_ns)
    bench.finish_step()


def starts(bench: Bench, group: str, partitions: int, topic: str = "orders") -> list[int]:
    """The start offset of each partition in the appliance's answer. None is committed."""
    found = bench.ask(
        Api.FETCH_OFFSETS, group=group, partitions=[[topic, number] for number in range(partitions)]
    )["offsets"]
    assert all(committed_ms == NOT_COMMITTED for *_, committed_ms in found)
    return [offset for _, _, offset, *_ in found]


def test_a_partition_that_was_added_while_members_were_there_begins_at_its_beginning(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Client(bench)
    settle(one)
    assert starts(bench, "billing", 4) == [-1] * 4
    grow(bench, "orders", 6)
    assert starts(bench, "billing", 6) == [-1, -1, -1, -1, 0, 0], (
        "also before a member has heard of it"
    )
    settle(one)
    bench.restart()
    one.heartbeat()
    settle(one)
    grow(bench, "orders", 7)
    assert starts(bench, "billing", 8) == [-1, -1, -1, -1, 0, 0, 0, -1]
    described = bench.ask(Api.DESCRIBE_GROUP, group="billing", part="partitions")["partitions"]
    assert [row["lag"] for row in described] == [None] * 4 + [1_000] * 3
    assert [row["committed"] for row in described] == [-1] * 7
    monkeypatch.setattr(bench.topics, "beginning_offset", lambda _topic, _partition: 30)
    assert starts(bench, "billing", 5) == [-1, -1, -1, -1, 30], "retention was there already"
    late = Client(bench, "another", "m2")
    settle(late)
    assert starts(bench, "another", 7) == [-1] * 7, "they were there before this group"
    assert bench.ask(Api.FETCH_OFFSETS, group="billing", partitions=None)["offsets"] == []


@pytest.mark.parametrize("is_member", [True, False])
def test_a_group_that_has_committed_was_there_also_while_it_had_no_members(
    bench: Bench, is_member: bool
) -> None:
    offset = ["orders", 0, 5, -1, ""]
    if is_member:
        one = Client(bench)
        settle(one)
        assert one.commit(offset) == []
        one.leave()
    else:
        assert bench.ask(Api.COMMIT_OFFSETS, group="billing", offsets=[offset])["refused"] == []
    grow(bench, "orders", 5)
    bench.restart()
    fetched: Any = bench.ask(
        Api.FETCH_OFFSETS, group="billing", partitions=[["orders", 0], ["orders", 1], ["orders", 4]]
    )["offsets"]
    assert [row[2] for row in fetched] == [5, -1, 0]
    two = Client(bench, member_id="m2")
    settle(two)
    assert bench.offset("billing", "orders", 4) == 0, "it has come back"


def test_a_group_that_left_nothing_behind_begins_anew(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    one.leave()
    grow(bench, "orders", 5)
    assert starts(bench, "billing", 5) == [-1] * 5
    two = Client(bench, member_id="m2")
    settle(two)
    assert starts(bench, "billing", 5) == [-1] * 5
    assert two.commit(["orders", 0, 5]) == []
    two.leave()
    bench.ask(Api.ALTER_GROUP_OFFSETS, group="billing", offsets=[["orders", 0, None]])
    grow(bench, "orders", 6)
    assert starts(bench, "billing", 6) == [-1] * 6


def test_a_topic_that_is_made_again_is_another_one(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    grow(bench, "orders", 5)
    bench.topics.delete("orders")
    bench.topics.create("orders", 6)
    bench.service.topics_changed(bench.now_ns)
    bench.finish_step()
    assert starts(bench, "billing", 6) == [0] * 6, "all of it is new to the group"
    assert list(bench.service._table.get("billing").begun) == [bench.topics.id_of("orders")]  # type: ignore[union-attr]


def test_what_a_step_that_was_undone_has_said_does_not_count(bench: Bench) -> None:
    one = Client(bench)
    bench.send(Api.GROUP_HEARTBEAT, one.request(), one.session)
    bench.service.settle()
    bench.store.rollback()
    bench.service.rolled_back(bench.now_ns)
    bench.service.drain_answers()
    grow(bench, "orders", 6)
    one.epoch = 0
    settle(one)
    assert starts(bench, "billing", 6) == [-1] * 6


def test_a_partition_that_a_new_group_gets_later_than_the_others_begins_where_it_ended_when_the_group_came(  # noqa: E501
    bench: Bench,
) -> None:
    topics = bench.topics
    assert isinstance(topics, FakeTopics)
    topics.views["orders"] = dataclasses.replace(
        topics.views["orders"], hand_overs={3: ((0, 100),)}
    )
    topic_id = topics.id_of("orders")
    topics.ends[topic_id, 3] = 40
    one = Client(bench)
    settle(one)
    assert [number for _, number in one.partitions] == [0, 1, 2]
    topics.ends[topic_id, 3] = 70
    assert starts(bench, "billing", 4) == [-1, -1, -1, 40]
    bench.restart()
    assert starts(bench, "billing", 4) == [-1, -1, -1, 40]
    one.heartbeat()
    assert one.commit(["orders", 0, 100]) == []
    settle(one)
    assert len(one.partitions) == 4
    assert bench.offset("billing", "orders", 3) == 40
    assert one.commit(["orders", 3, 65]) == []
    assert bench.offset("billing", "orders", 3) == 65
