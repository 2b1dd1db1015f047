"""Committed offsets: what is kept, what is refused, and when it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.groups.base.limits import COMMITS_MAX, GroupLimits
from appliance.groups.consumer.offset_expiry import EMPTY_KEPT_MS
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    GroupNotEmptyError,
    InvalidRequestError,
    TailraceError,
    UnknownGroupError,
    UnknownMemberError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench, Client, FakeTopics, settle

MINUTE_S = 60


def fetched(bench: Bench, group: str, partitions: Any = None) -> list[Any]:
    found: list[Any] = bench.ask(Api.FETCH_OFFSETS, group=group, partitions=partitions)["offsets"]
    return [one[:5] for one in found]


def test_a_commit_is_kept_with_metadata_and_leader_epoch(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    assert (
        one.commit(
            ["orders", 0, 10, 3, "checked"], ["orders", 1, 1_000], ["orders", 2, 0, None, None]
        )
        == []
    )
    assert fetched(bench, "billing") == [
        ["orders", 0, 10, 3, "checked"],
        ["orders", 1, 1_000, -1, ""],
        ["orders", 2, 0, -1, ""],
    ]
    assert fetched(bench, "billing", [["orders", 3], ["orders", 0], ["nowhere", 0]]) == [
        ["nowhere", 0, -1, -1, ""], ["orders", 0, 10, 3, "checked"], ["orders", 3, -1, -1, ""],
    ]  # fmt: skip
    (first, *_) = bench.ask(Api.FETCH_OFFSETS, group="billing")["offsets"]
    assert first[5] == bench.wall_us() // 1_000
    assert fetched(bench, "no such group") == []


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (["orders", 0, -1], ErrorCode.OFFSET_OUT_OF_RANGE),
        (["orders", 0, 1_001], ErrorCode.OFFSET_OUT_OF_RANGE),
        (["nowhere", 0, 5], ErrorCode.UNKNOWN_TOPIC),
        (["orders", 4, 5], ErrorCode.PARTITION_OUT_OF_RANGE),
        (["orders", -1, 5], ErrorCode.PARTITION_OUT_OF_RANGE),
        (["orders", 0, 5, -1, "m" * 4_097], ErrorCode.INVALID_REQUEST),
        (["orders", 0, 5, -1, "é" * 2_049], ErrorCode.INVALID_REQUEST),
        (["starting", 0, 5], ErrorCode.NOT_READY),
    ],
)
def test_what_cannot_be_committed_is_refused_and_the_rest_kept(
    bench: Bench, entry: list[Any], code: ErrorCode
) -> None:
    bench.topics.ends[bench.topics.create("starting", 1), 0] = None
    one = Client(bench, topics=["orders", "starting"])
    settle(one)
    ((topic, partition, refused, sentence),) = one.commit(entry, ["orders", 1, 7, -1, "m" * 4_096])
    assert ([topic, partition], refused) == (entry[:2], code)
    assert sentence
    assert fetched(bench, "billing") == [["orders", 1, 7, -1, "m" * 4_096]]


@pytest.mark.parametrize(
    "offsets",
    [None, 5, {}, [5], [[]], [["orders", 0]], [["orders", 0, 1, 2, "m", 6]], [["orders", "0", 1]],
    [["orders", 0, True]], [["orders", 0, 1.5]],
     [["orders", 0, 1 << 63]], [["orders", 1 << 63, 1]], [["orders", 1 << 63, None]],
     [["orders", 0, 1, -2]], [["orders", 0, 1, -1, 7]],
     [[None, 0, 1]], [["orders", 0, 1]] * (COMMITS_MAX + 1)],
)  # fmt: skip
def test_a_commit_that_is_none_changes_nothing(bench: Bench, offsets: Any) -> None:
    for api in (Api.COMMIT_OFFSETS, Api.ALTER_GROUP_OFFSETS):
        with pytest.raises(InvalidRequestError):
            bench.ask(api, group="billing", offsets=offsets)
    assert bench.service.summary("billing") is None


def test_commits_of_members_that_are_none(bench: Bench) -> None:
    with pytest.raises(UnknownMemberError):
        bench.ask(
            Api.COMMIT_OFFSETS,
            group="billing",
            member_id="m1",
            member_epoch=1,
            offsets=[["orders", 0, 1]],
        )
    settle(Client(bench))
    with pytest.raises(UnknownMemberError):
        bench.ask(
            Api.COMMIT_OFFSETS,
            group="billing",
            member_id="m2",
            member_epoch=1,
            offsets=[["orders", 0, 1]],
        )
    for epoch in (None, "1", -3, 1.0):
        with pytest.raises(InvalidRequestError, match="member_epoch"):
            bench.ask(
                Api.COMMIT_OFFSETS,
                group="billing",
                member_id="m1",
                member_epoch=epoch,
                offsets=[["orders", 0, 1]],
            )


def test_a_commit_of_an_earlier_ownership_is_fenced(bench: Bench) -> None:
    members = [Client(bench, member_id="m1"), Client(bench, member_id="m2")]
    settle(*members)
    before = {one.member_id: set(one.partitions) for one in members}
    third = Client(bench, member_id="m3")
    settle(*members, third)
    (loser,) = [one for one in members if before[one.member_id] != set(one.partitions)]
    (lost,) = before[loser.member_id] - set(loser.partitions)
    (kept,) = loser.partitions
    old_epoch = loser.epoch - 1

    def commit(partition: tuple[str, int], epoch: int) -> list[Any]:
        request: dict[str, Any] = {
            "member_id": loser.member_id,
            "member_epoch": epoch,
            "offsets": [[*partition, 5]],
        }
        return [
            code
            for *_, code, _ in bench.ask(Api.COMMIT_OFFSETS, group="billing", **request)["refused"]
        ]

    assert commit(kept, old_epoch) == [], "it owned the partition then, and does now"
    assert commit(lost, old_epoch) == [ErrorCode.FENCED_MEMBER]
    assert commit(lost, loser.epoch) == [ErrorCode.PARTITION_NOT_OWNED]
    for one in (*members, third):
        if one is not loser:
            one.leave()
    settle(loser)
    assert lost in loser.partitions, "it is its own again"
    assert commit(lost, old_epoch) == [ErrorCode.FENCED_MEMBER], (
        "a commit from before somebody else had it"
    )
    assert commit(lost, loser.epoch) == []


def test_a_member_commits_what_it_is_giving_back(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1"), Client(bench, member_id="m2")
    settle(one)
    two.heartbeat()
    before = set(one.partitions)
    one.heartbeat()
    (given_back, _) = sorted(before - set(one.partitions))
    assert one.commit([*given_back, 9]) == [], "in its listener's on_partitions_revoked"
    one.heartbeat()
    two.heartbeat()
    ((*_, code, _),) = one.commit([*given_back, 3])
    assert code == ErrorCode.PARTITION_NOT_OWNED
    assert bench.offset("billing", *given_back) == 9


def test_commits_from_outside_make_a_group_and_are_altered_by_operators(bench: Bench) -> None:
    assert bench.ask(Api.COMMIT_OFFSETS, group="tool", offsets=[["orders", 0, 5]])["refused"] == []
    assert (
        bench.ask(
            Api.COMMIT_OFFSETS,
            group="tool",
            member_id=None,
            member_epoch=-1,
            offsets=[["orders", 1, 6]],
        )["refused"]
        == []
    )
    assert bench.summary("tool")["state"] == "EMPTY"
    alter: dict[str, Any] = {
        "group": "tool",
        "offsets": [
            ["orders", 0, None],
            ["orders", 1, 7, "by hand"],
            ["nowhere", 0, None],
            ["orders", 2, 5_000],
        ],
    }
    refused = bench.ask(Api.ALTER_GROUP_OFFSETS, **alter)["refused"]
    assert [(topic, code) for topic, _, code, _ in refused] == [
        ("nowhere", ErrorCode.UNKNOWN_TOPIC), ("orders", ErrorCode.OFFSET_OUT_OF_RANGE),
    ]  # fmt: skip
    assert fetched(bench, "tool") == [["orders", 1, 7, -1, "by hand"]]
    one = Client(bench, group="tool")
    one.heartbeat()
    with pytest.raises(GroupNotEmptyError):
        bench.ask(Api.ALTER_GROUP_OFFSETS, **alter)
    one.leave()
    assert (
        bench.ask(Api.ALTER_GROUP_OFFSETS, group="fresh", offsets=[["orders", 0, 3]])["refused"]
        == []
    )
    assert bench.offset("fresh", "orders", 0) == 3


def test_a_topic_that_is_deleted_and_made_again_has_no_offsets(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    one.commit(["orders", 0, 5])
    gone = bench.topics.id_of("orders")
    bench.topics.delete("orders")
    bench.service.topics_changed(bench.now_ns)
    bench.topics.create("orders", 4)
    bench.service.topics_changed(bench.now_ns)
    bench.finish_step()
    assert fetched(bench, "billing") == [], "nothing of the old topic is committed in the new one"
    [[_, _, begins, *_, committed_ms]] = bench.ask(
        Api.FETCH_OFFSETS, group="billing", partitions=[["orders", 0]]
    )["offsets"]
    assert (begins, committed_ms) == (0, -1), "all of it is new to the group"
    bench.wait(0.1)
    assert gone not in bench.store.all_offset_topics(), "the rows are gone, too"
    settle(one)
    assert len(one.partitions) == 4


def test_deleted_groups_have_nothing(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    one.commit(["orders", 0, 5])
    bench.ask(Api.COMMIT_OFFSETS, group="tool", offsets=[["orders", 0, 5]])
    results = bench.ask(Api.DELETE_GROUPS, groups=["billing", "tool", "nobody", 7, "x" * 10_000])[
        "results"
    ]
    assert [one["code"] for one in results] == [
        ErrorCode.GROUP_NOT_EMPTY, 0, ErrorCode.UNKNOWN_GROUP, ErrorCode.INVALID_GROUP,
        ErrorCode.INVALID_GROUP,
    ]  # fmt: skip
    one.leave()
    assert [one["code"] for one in bench.ask(Api.DELETE_GROUPS, groups=["billing"])["results"]] == [
        0
    ]
    bench.restart()
    for group in ("billing", "tool"):
        assert fetched(bench, group) == []
        with pytest.raises(UnknownGroupError):
            bench.summary(group)
    settle(Client(bench))
    assert bench.offset("billing", "orders", 0) == -1


def test_offsets_expire_when_the_group_has_been_empty_for_the_retention(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits=GroupLimits(offsets_retention_minutes=60))
    one = Client(bench, session_timeout_ms=1_800_000)
    settle(one)
    one.commit(["orders", 0, 5])
    bench.ask(Api.COMMIT_OFFSETS, group="tool", offsets=[["orders", 0, 5]])
    for _ in range(4):
        bench.wait(25 * MINUTE_S)
        one.heartbeat()
    assert bench.offset("billing", "orders", 0) == 5, "it has a member"
    assert bench.offset("tool", "orders", 0) == -1
    one.leave()
    bench.wait(55 * MINUTE_S)
    assert bench.offset("billing", "orders", 0) == 5
    bench.ask(Api.COMMIT_OFFSETS, group="billing", offsets=[["orders", 1, 6]])
    bench.wait(10 * MINUTE_S)
    assert [one[:3] for one in fetched(bench, "billing")] == [["orders", 1, 6]], (
        "what was committed since stays"
    )
    bench.wait(55 * MINUTE_S)
    with pytest.raises(UnknownGroupError):
        bench.summary("billing")
    bench.restart()
    assert fetched(bench, "billing") == []
    bench.close()


def test_a_wall_clock_that_jumps_forward_expires_no_offset_early(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits=GroupLimits(offsets_retention_minutes=10))
    bench.ask(Api.COMMIT_OFFSETS, group="nightly", offsets=[["orders", 0, 5]])
    bench.clock_ahead_us = 365 * 86_400_000_000
    bench.wait(500)
    assert bench.offset("nightly", "orders", 0) == 5
    bench.clock_ahead_us = 0
    bench.wait(200)
    assert bench.offset("nightly", "orders", 0) == -1
    bench.close()


def test_groups_without_offsets_go_soon_after_their_last_member(bench: Bench) -> None:
    one = Client(bench, group="console-4711")
    one.heartbeat()
    one.leave()
    bench.wait(EMPTY_KEPT_MS / 1_000 - MINUTE_S)
    assert bench.summary("console-4711")["state"] == "EMPTY"
    bench.wait(2.5 * MINUTE_S)
    assert bench.service.summary("console-4711") is None


def test_offsets_of_topics_that_went_while_the_process_was_down_expire(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, FakeTopics(orders=2, clicks=2), limits=GroupLimits(offsets_retention_minutes=60)
    )
    one = Client(bench, topics=["orders", "clicks"], session_timeout_ms=1_800_000)
    settle(one)
    one.commit(["orders", 0, 5], ["clicks", 1, 6])
    gone = bench.topics.id_of("clicks")
    bench.topics.delete("clicks")
    bench.restart()
    settle(one)
    for _ in range(3):
        bench.wait(20 * MINUTE_S)
        one.heartbeat()
    bench.wait(2 * MINUTE_S)
    assert bench.store.all_offset_topics() == [bench.topics.id_of("orders")]
    assert gone not in bench.store.all_offset_topics()
    bench.close()


def test_offsets_of_one_step_are_all_kept_or_all_forgotten(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    one.commit(["orders", 0, 5])
    request = {
        "group": "billing",
        "member_id": "m1",
        "member_epoch": one.epoch,
        "offsets": [["orders", 0, 6]],
    }
    sent = bench.send(Api.COMMIT_OFFSETS, request)
    read = bench.send(Api.FETCH_OFFSETS, {"group": "billing", "partitions": [["orders", 0]]})
    other = bench.send(Api.FETCH_OFFSETS, {"group": "tool", "partitions": [["orders", 0]]})
    bench.service.settle()
    bench.store.rollback()
    bench.service.rolled_back(bench.now_ns, TailraceError("the disk is full", ErrorCode.DISK_FULL))
    answers = {
        answer.requester.correlation_id: answer.code for answer in bench.service.drain_answers()
    }
    assert answers == {sent: ErrorCode.DISK_FULL, read: ErrorCode.DISK_FULL, other: 0}, (
        "what it read was undone"
    )
    assert bench.offset("billing", "orders", 0) == 5
    one.heartbeat()
    assert one.commit(["orders", 0, 7]) == []
