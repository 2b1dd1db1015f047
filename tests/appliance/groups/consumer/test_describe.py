"""Lists and descriptions: whole, in pages that fit, and at scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.messages import Requester
from appliance.groups.consumer.describe import FRAME_BYTES
from tailrace.core.errors import GroupFullError, InvalidRequestError, UnknownGroupError
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench, Client, FakeTopics, settle


def pages(bench: Bench, api: int, name: str, **request: Any) -> tuple[list[Any], int]:
    """All entries, and the number of pages."""
    found: list[Any] = []
    after = None
    for count in range(1, 10_000):
        answer = bench.ask(api, **request, after=after)
        found += answer[name]
        after = answer["next"]
        if after is None:
            return found, count
        assert answer[name], "each page goes on"
    raise AssertionError("the list has no end")


def test_a_group_is_described_with_members_and_lag(bench: Bench) -> None:
    one = Client(bench, client_id="app-1", instance_id="pod-0")
    settle(one)
    one.commit(["orders", 0, 400, -1, "note"], ["orders", 1, 1_000])
    topic_id = bench.topics.id_of("orders")
    bench.topics.ends[topic_id, 3] = None
    bench.wait(2)
    answer = bench.ask(Api.DESCRIBE_GROUP, group="billing", part="members")
    assert answer["next"] is None
    assert answer["group"] == {
        "group": "billing", "kind": "consumer", "state": "STABLE", "members": 1,
        "assignor": "sticky", "epoch": 1, "rebalances": 1,
        "created_ms": answer["group"]["created_ms"], "empty_since_ms": 0, "trouble": "",
    }  # fmt: skip
    assert answer["members"] == [
        {
            "member_id": "m1", "instance_id": "pod-0", "client_id": "app-1", "epoch": 1,
            "state": "STABLE", "topics": ["orders"],
            "owned": {"orders": [0, 1, 2, 3]}, "target": {"orders": [0, 1, 2, 3]},
            "last_heartbeat_ms_ago": 2_000, "session_timeout_ms": 45_000,
            "stuck": "",
        }
    ]  # fmt: skip
    partitions = bench.ask(Api.DESCRIBE_GROUP, group="billing", part="partitions")["partitions"]
    assert [(one["partition"], one["committed"], one["end"], one["lag"],
    one["member_id"]) for one in partitions] == [
        (0, 400, 1_000, 600, "m1"), (1, 1_000, 1_000, 0, "m1"), (2, -1, 1_000, None, "m1"),
        (3, -1, -1, None, "m1"),
    ]  # fmt: skip
    assert (partitions[0]["topic"], partitions[0]["metadata"], partitions[0]["beginning"]) == (
        "orders",
        "note",
        0,
    )
    one.leave()
    partitions = bench.ask(Api.DESCRIBE_GROUP, group="billing", part="partitions")["partitions"]
    assert [(one["partition"], one["member_id"]) for one in partitions] == [(0, None), (1, None)], (
        "without members, what was committed"
    )


def test_what_cannot_be_described(bench: Bench) -> None:
    with pytest.raises(UnknownGroupError):
        bench.ask(Api.DESCRIBE_GROUP, group="billing")
    settle(Client(bench))
    for wrong in (
        {"part": "all"}, {"after": 5}, {"part": "partitions", "after": "orders"},
        {"part": "partitions", "after": ["orders"]},
        {"part": "partitions", "after": ["orders", 1 << 63]},
        {"part": "partitions", "after": ["orders", -2]},
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError):
            bench.ask(Api.DESCRIBE_GROUP, group="billing", **wrong)
    for after in (5, "x" * 250):
        with pytest.raises(InvalidRequestError):
            bench.ask(Api.LIST_GROUPS, after=after)
    for partitions in ("orders", [["orders"]], [["orders", -1]], [5]):
        with pytest.raises(InvalidRequestError):
            bench.ask(Api.FETCH_OFFSETS, group="billing", partitions=partitions)


def test_the_id_of_a_topic_of_another_name_gets_no_offsets(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    one.commit(["orders", 0, 400, -1, ""])
    bench.topics.create("mine", 1)
    topic_id = bench.topics.id_of("orders")
    asked = [["mine", 0, topic_id], ["orders", 0, topic_id]]
    found = bench.ask(Api.FETCH_OFFSETS, group="billing", partitions=asked)["offsets"]
    assert [(row[0], row[2], row[6]) for row in found] == [
        ("mine", -1, ""), ("orders", 400, topic_id)
    ]  # fmt: skip


def test_partitions_and_offsets_come_in_pages_without_gaps(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, FakeTopics(**{f"t{number:02d}": 50 for number in range(20)}), answer_max=8_192
    )
    names = [topic.name for topic in bench.topics.topics()]
    one = Client(bench, topics=[names[0]])
    settle(one)
    for name in names:
        member: dict[str, Any] = (
            {"member_id": "m1", "member_epoch": one.epoch} if name == names[0] else {}
        )
        for first in range(0, 50, 10):
            entries = [
                [name, partition, partition, -1, "metadata" * 20]
                for partition in range(first, first + 10, 2)
            ]
            assert (
                bench.ask(Api.COMMIT_OFFSETS, group="billing", **member, offsets=entries)["refused"]
                == []
            )
    described, count = pages(
        bench, Api.DESCRIBE_GROUP, "partitions", group="billing", part="partitions"
    )
    assert count > 10
    expected = [
        (name, partition)
        for name in names
        for partition in range(0, 50, 1 if name == names[0] else 2)
    ]
    assert [(one["topic"], one["partition"]) for one in described] == expected
    fetched, _ = pages(bench, Api.FETCH_OFFSETS, "offsets", group="billing", partitions=None)
    assert [(topic, partition) for topic, partition, *_ in fetched] == [
        (name, partition) for name in names for partition in range(0, 50, 2)
    ]
    asked = [[name, partition] for name in reversed(names) for partition in (4, 3, 3)]
    fetched, _ = pages(bench, Api.FETCH_OFFSETS, "offsets", group="billing", partitions=asked)
    assert [(topic, partition, offset) for topic, partition, offset, *_ in fetched] == [
        (name, partition, 4 if partition == 4 else -1) for name in names for partition in (3, 4)
    ]
    bench.close()


def test_one_group_with_10_000_members(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeTopics(orders=1_000), answer_max=1 << 16)
    for number in range(10_000):
        request = {
            "group": "crowd", "member_id": f"m{number:05d}", "member_epoch": 0,
            "topics": ["orders"], "client_id": f"app-{number}", "owned": {},
        }  # fmt: skip
        bench.service.handle(
            Requester(number % 4, number, number), Api.GROUP_HEARTBEAT, request, bench.now_ns
        )
    answers = bench.finish_step()
    assert len(answers) == 10_000
    assert (
        sum(
            len(one["assignment"].get(bench.topics.id_of("orders"), ())) for one in answers.values()
        )
        == 1_000
    )
    assert bench.summary("crowd")["epoch"] == 1
    with pytest.raises(GroupFullError):
        Client(bench, group="crowd", member_id="one too many").heartbeat()
    members, _ = pages(bench, Api.DESCRIBE_GROUP, "members", group="crowd", part="members")
    assert [one["member_id"] for one in members] == [f"m{number:05d}" for number in range(10_000)]
    bench.restart()
    (listed,) = bench.ask(Api.LIST_GROUPS)["groups"]
    assert (listed["members"], listed["state"]) == (10_000, "STABLE")
    bench.wait(50)
    assert bench.summary("crowd")["state"] == "EMPTY", "all sessions have ended"
    bench.close()


def test_ten_thousand_groups(tmp_path: Path) -> None:
    bench = Bench(tmp_path, answer_max=1 << 16)
    names = [f"group-{number:05d}" for number in range(10_000)]
    for number, name in enumerate(names):
        request = {"group": name, "offsets": [["orders", 0, number % 1_000]]}
        bench.service.handle(Requester(0, 1, number), Api.COMMIT_OFFSETS, request, bench.now_ns)
    bench.finish_step()
    listed, count = pages(bench, Api.LIST_GROUPS, "groups")
    assert [one["group"] for one in listed] == names
    assert count > 10
    bench.restart()
    assert [one["group"] for one in pages(bench, Api.LIST_GROUPS, "groups")[0]] == names
    assert bench.offset(names[4_711], "orders", 0) == 711
    for first in range(0, 10_000, 1_000):
        bench.ask(Api.DELETE_GROUPS, groups=names[first : first + 1_000])
    assert pages(bench, Api.LIST_GROUPS, "groups") == ([], 1)
    bench.close()


def test_a_member_with_very_many_topics_is_described_short(tmp_path: Path) -> None:
    topics = FakeTopics(**{f"topic-with-a-long-name-{number:04d}": 1 for number in range(2_000)})
    bench = Bench(tmp_path, topics, answer_max=1 << 18)
    one = Client(bench, topics=[topic.name for topic in topics.topics()])
    one.heartbeat()
    assert len(one.owned) == 2_000
    bench.answer_max = 1 << 15
    bench.restart()
    answer = bench.ask(Api.DESCRIBE_GROUP, group="billing", part="members")
    (member,) = answer["members"]
    assert member["is_shortened"]
    assert len(orjson.dumps(answer)) < (1 << 15) - FRAME_BYTES


def test_list_shows_members_and_states(bench: Bench) -> None:
    settle(Client(bench, group="a"), Client(bench, group="b", member_id="m2"))
    Client(bench, group="b", member_id="m3").heartbeat()
    bench.ask(Api.COMMIT_OFFSETS, group="c", offsets=[["orders", 0, 5]])
    listed = bench.ask(Api.LIST_GROUPS, after="")["groups"]
    assert [(one["group"], one["state"], one["members"], one["kind"]) for one in listed] == [
        ("a", "STABLE", 1, "consumer"), ("b", "RECONCILING", 2, "consumer"),
        ("c", "EMPTY", 0, "consumer"),
    ]  # fmt: skip
    assert GroupLimits().groups_max == 100_000
