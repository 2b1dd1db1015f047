"""Share groups as the service sees them: acquiring, acknowledging, what wakes whom, what survives a
start and a failed commit, what operators do.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.groups.base.limits import GroupLimits
from appliance.groups.share import quotas as room
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    GroupFullError,
    GroupNotEmptyError,
    InvalidRequestError,
    NotAuthorizedError,
    TailraceError,
    UnknownGroupError,
    UnknownMemberError,
)
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import SHARE_RUNS_MAX
from tests.appliance.groups.share.world import S, World


@pytest.fixture
def world(tmp_path: pathlib.Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_a_group_begins_at_the_end_unless_its_member_says_earliest(world: World) -> None:
    topic = world.topics.make("t", end=10)
    assert world.join("late", "m", "t").acquire(5)["ends"] == [[topic, 0, 10]]
    early = world.join("early", "m", "t", offset_reset="earliest")
    assert early.topic_names == {topic: "t"}
    answer = early.acquire(4)
    assert answer == {
        "acquired": [[topic, 0, 0, 3, 1]],
        "dead": [],
        "ends": [],
        "lock_ms": 30_000,
        "refused": [],
    }
    early.heartbeat(-1)
    assert world.join("early", "n", "t").acquire(100)["acquired"] == [
        [topic, 0, 0, 3, 2],
        [topic, 0, 4, 9, 1],
    ]  # what was decided is remembered


def test_what_is_new_in_a_topic_that_the_group_knows_is_read_from_its_beginning(
    world: World,
) -> None:
    topic = world.topics.make("t", end=10)
    member = world.join("g", "m", "t", "made-later")
    world.topics.make("t", 2)
    world.topics.ends[topic, 1] = 3
    later = world.topics.make("made-later", end=2)
    world.change_topics()
    answer = member.acquire(100)
    assert sorted(answer["acquired"]) == sorted([[topic, 1, 0, 2, 1], [later, 0, 0, 1, 1]])


def test_partitions_take_turns_and_members_share_them(world: World) -> None:
    topic = world.topics.make("t", 3, end=100)
    one, two = (world.join("g", name, "t", offset_reset="earliest") for name in ("one", "two"))
    given = [member.acquire(10)["acquired"] for _ in range(3) for member in (one, two)]
    assert all(len(runs) == 1 for runs in given)
    assert {runs[0][1] for runs in given[0::2]} == {runs[0][1] for runs in given[1::2]} == {0, 1, 2}
    runs = sorted(run for each in given for run in each)
    assert runs == [
        [topic, number, first, first + 9, 1] for number in range(3) for first in (0, 10)
    ]


def test_an_acknowledgement_may_come_with_the_next_request(world: World) -> None:
    topic = world.topics.make("t", end=4)
    member = world.join("g", "m", "t", offset_reset="earliest")
    member.acquire(2)
    answer = member.acquire(
        2, (topic, 0, 0, 0, "accept"), (topic, 0, 1, 1, "release"), (topic, 0, 3, 3, "accept")
    )
    assert answer["acquired"] == [[topic, 0, 1, 1, 2], [topic, 0, 2, 2, 1]]
    assert [run[:5] for run in answer["refused"]] == [[topic, 0, 3, 3, int(ErrorCode.LOCK_LOST)]]
    assert member.acknowledge((topic, 0, 1, 2, "accept"), (topic, 7, 0, 0, "accept"))[0][:5] == [
        topic,
        7,
        0,
        0,
        int(ErrorCode.UNKNOWN_TOPIC),
    ]


def test_a_request_whose_answer_was_lost_is_answered_again_and_done_once(world: World) -> None:
    topic = world.topics.make("t", end=10)
    member = world.join("g", "m", "t", offset_reset="earliest")
    request = member.acquire_request(5)
    with pytest.raises(TailraceError, match="killed"):
        world.request(Api.SHARE_ACQUIRE, request, is_killed=True)
    assert world.request(Api.SHARE_ACQUIRE, request)["acquired"] == [[topic, 0, 0, 4, 1]]
    request = member.named(acknowledge=[[topic, 0, 0, 4, "accept"]], sequence=2)
    with pytest.raises(TailraceError, match="killed"):
        world.request(Api.SHARE_ACKNOWLEDGE, request, is_killed=True)
    assert world.request(Api.SHARE_ACKNOWLEDGE, request)["refused"] == []
    with pytest.raises(InvalidRequestError, match="ascend"):
        world.request(Api.SHARE_ACKNOWLEDGE, {**request, "sequence": 1})
    request = member.named(acknowledge=[[topic, 0, 0, 4, "accept"]], sequence=3)
    assert len(world.request(Api.SHARE_ACKNOWLEDGE, request)["refused"]) == 1


def test_locks_and_members_outlive_the_process(world: World) -> None:
    topic = world.topics.make("t", end=10)
    member = world.join("g", "m", "t", offset_reset="earliest")
    member.acquire(3)
    world.restart()
    assert world.join("g", "n", "t").acquire(10)["acquired"] == [[topic, 0, 3, 9, 1]]
    assert member.acknowledge((topic, 0, 0, 2, "accept")) == []
    assert member.heartbeat()["member_epoch"] == member.epoch


def test_what_a_log_lost_in_a_power_failure_is_not_confused_with_what_comes_in_its_place(
    world: World,
) -> None:
    topic = world.topics.make("t", end=10)
    member = world.join("g", "m", "t", offset_reset="earliest")
    member.acquire(10)
    assert member.acknowledge((topic, 0, 0, 9, "accept")) == []
    world.topics.ends[topic, 0] = 7
    world.restart()
    world.topics.ends[topic, 0] = 12  # producers were quicker than the group's members
    assert member.acquire(10)["acquired"] == [[topic, 0, 7, 11, 1]]


def test_a_commit_that_fails_has_changed_nothing(world: World) -> None:
    topic = world.topics.make("t", end=10)
    member = world.join("g", "m", "t", offset_reset="earliest")
    world.failing_commit(Api.SHARE_ACQUIRE, member.acquire_request(5))
    assert member.acquire(5)["acquired"] == [[topic, 0, 0, 4, 1]]
    world.failing_commit(
        Api.SHARE_ACKNOWLEDGE, member.named(acknowledge=[[topic, 0, 0, 4, "accept"]])
    )
    assert member.acknowledge((topic, 0, 0, 4, "accept")) == []
    joining = {
        "group": "new",
        "kind": "share",
        "member_id": "x",
        "member_epoch": 0,
        "topics": ["t"],
    }
    world.failing_commit(Api.GROUP_HEARTBEAT, joining)
    assert not world.groups.has("new")
    assert world.join("new", "x", "t").epoch == 1
    world.close_session(1)  # sessions of members are known after a rollback, too
    world.failing_commit(Api.GROUP_HEARTBEAT, {**joining, "group": "g"}, 2)
    world.advance(2 * S)
    with pytest.raises(UnknownMemberError):
        member.heartbeat()


def test_locks_pass_in_their_time_and_wake_those_who_wait(world: World) -> None:
    topic = world.topics.make("t", end=2, group_share_record_lock_duration_ms=5_000)
    one, two = (
        world.join("g", "one", "t", offset_reset="earliest"),
        world.join("g", "two", "t", session=2),
    )
    assert one.acquire(2)["lock_ms"] == 5_000
    two.acquire(2)
    world.advance(3 * S)
    assert one.acknowledge((topic, 0, 0, 0, "renew")) == []
    world.advance(3 * S)
    assert [push.session for push in world.pushes] == [2]
    assert two.acquire(2)["acquired"] == [[topic, 0, 1, 1, 2]]
    assert one.acknowledge((topic, 0, 0, 1, "accept"))[0][:4] == [topic, 0, 1, 1]
    assert world.groups.next_deadline_ns() is not None


def test_a_partition_with_too_many_in_flight_waits_and_says_so_when_it_goes_on(
    world: World,
) -> None:
    topic = world.topics.make("t", end=1_000, group_share_partition_max_record_locks=10)
    one, two = (
        world.join("g", "one", "t", offset_reset="earliest"),
        world.join("g", "two", "t", session=2),
    )
    assert one.acquire(100)["acquired"] == [[topic, 0, 0, 9, 1]]
    assert two.acquire(100) == {"acquired": [], "dead": [], "ends": [], "lock_ms": 0, "refused": []}
    one.acknowledge((topic, 0, 5, 6, "accept"))
    assert [push.session for push in world.pushes] == [2]
    assert two.acquire(100)["acquired"] == [[topic, 0, 10, 11, 1]]


def test_a_paused_topic_gives_nothing_until_it_goes_on(world: World) -> None:
    topic = world.topics.make("t", end=2, delivery_paused=True)
    member = world.join("g", "m", "t", offset_reset="earliest")
    assert member.acquire(5)["ends"] == []
    world.topics.make("t", delivery_paused=False)
    world.change_topics()
    assert len(world.pushes) == 1
    assert member.acquire(5)["acquired"] == [[topic, 0, 0, 1, 1]]


def test_dead_records_are_handed_out_to_be_dead_lettered(world: World) -> None:
    topic = world.topics.make("t", end=3, group_share_delivery_count_limit=2)
    member = world.join("g", "m", "t", offset_reset="earliest")
    for count in (1, 2):
        assert member.acquire(1)["acquired"] == [[topic, 0, 0, 0, count]]
        member.acknowledge((topic, 0, 0, 0, "release"))
    answer = member.acquire(3)
    assert (answer["acquired"], answer["dead"]) == ([[topic, 0, 1, 2, 1]], [[topic, 0, 0, 0, 2]])
    world.restart()
    world.advance(31 * S)
    other = world.join("g", "other", "t")
    assert other.acquire(1)["dead"] == [[topic, 0, 0, 0, 2]]
    assert other.acknowledge((topic, 0, 0, 0, "accept")) == []


def test_records_at_the_delivery_limit_are_seen_by_operators_until_they_are_done(
    world: World,
) -> None:
    topic = world.topics.make("t", end=3, group_share_delivery_count_limit=2)
    member = world.join("g", "m", "t", offset_reset="earliest")

    def seen() -> tuple[int, int]:
        [row] = world.request(Api.DESCRIBE_GROUP, {"group": "g", "part": "partitions"})[
            "partitions"
        ]
        return row["at_delivery_limit"], row["in_flight"]

    for _ in range(2):
        member.acquire(3)
        member.acknowledge((topic, 0, 0, 2, "release"))
    assert seen() == (3, 3)
    for _ in range(3):  # the consumer tries to write them to the dead-letter topic, and cannot
        assert member.acquire(3)["dead"]
        assert seen() == (3, 3)
        world.advance(31 * S)
        member.heartbeat()
        assert seen() == (3, 3)
    assert member.acquire(3)["dead"]
    member.acknowledge((topic, 0, 0, 1, "accept"))
    assert seen() == (1, 1)


def test_a_topic_that_is_deleted_takes_its_state_along(world: World) -> None:
    topic = world.topics.make("t", end=3)
    member = world.join("g", "m", "t", offset_reset="earliest")
    member.acquire(1)
    del world.topics.views["t"]
    world.change_topics()
    assert member.acquire(1)["acquired"] == []
    again = world.topics.make("t", topic_id="ff" * 16, end=2)
    world.change_topics()
    assert member.acquire(5, (topic, 0, 0, 0, "accept"))["acquired"] == [[again, 0, 0, 1, 1]]
    world.restart()
    assert [row.topic_id for row in world.store.share_states(1)] == [again]


def test_damaged_bytes_of_a_state_deliver_its_records_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    topic = world.topics.make("t", end=3)
    member = world.join("g", "m", "t", offset_reset="earliest")
    member.acquire(3)
    member.acknowledge((topic, 0, 0, 2, "accept"))
    world.store.write_many("UPDATE share_partitions SET state = ?", [(b"\1\0\0\0garbage",)])
    world.store.commit()
    world.restart()
    assert "share_state_damaged" in caplog.text
    assert member.acquire(5)["acquired"] == [[topic, 0, 0, 2, 1]]


@pytest.mark.parametrize(
    "given",
    [
        7, [7], [["t", 0, 0, 0]], [["t", 0, 0, 0, "eat"]], [["t", 0, 1, 0, "accept"]],
        [["t", -1, 0, 0, "accept"]], [["t", 0, 0, 2**63, "accept"]],
        [["t", 0, 0.5, 1, "accept"]], [[None, 0, 0, 0, "accept"]], [["t", 0, 0, 0, ["accept"]]],
        [["t", 0, 0, 0, "accept"]] * (SHARE_RUNS_MAX + 1),
        [["t", 0, 5, 9, "renew"], ["u", 0, 5, 9, "renew"], ["t", 0, 2, 5, "accept"]],
    ],
)  # fmt: skip
def test_acknowledgements_that_make_no_sense_change_nothing(world: World, given: Any) -> None:
    topic = world.topics.make("t", end=1)
    member = world.join("g", "m", "t", offset_reset="earliest")
    member.acquire(1)
    if isinstance(given, list) and len(given) < 3:
        given = [[topic, 0, 0, 0, "accept"], *given]
    with pytest.raises(InvalidRequestError):
        world.request(Api.SHARE_ACKNOWLEDGE, member.named(acknowledge=given))
    assert member.acknowledge((topic, 0, 0, 0, "accept")) == []


def test_answers_stay_within_their_bounds(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, answer_max=120_000)
    topic = world.topics.make("t", end=2_000)
    member = world.join("g", "m", "t", offset_reset="earliest")
    assert member.acquire(2_000)["acquired"] == [[topic, 0, 0, 1_999, 1]]
    for start in range(0, 2_000, 2 * SHARE_RUNS_MAX):
        member.acknowledge(
            *(
                (topic, 0, offset, offset, "accept")
                for offset in range(start, start + 2 * SHARE_RUNS_MAX, 2)
            )
        )
    refused = member.acknowledge((topic, 0, 0, 1_999, "release"))
    assert [run[:4] for run in refused] == [
        [topic, 0, 0, 1_998]
    ]  # too many runs to tell them apart
    seen: list[list[Any]] = []
    while runs := member.acquire(2_000)["acquired"]:
        seen += runs
    assert [run[2] for run in seen] == list(range(1, 2_000, 2))
    refused = member.acknowledge(
        *((topic, 0, 2_000 + offset, 2_000 + offset, "accept") for offset in range(SHARE_RUNS_MAX))
    )
    assert len(refused) == SHARE_RUNS_MAX
    world.close()


def test_a_full_group_and_one_that_is_described_moved_and_deleted(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, GroupLimits(members_max=2))
    topic = world.topics.make("t", 3, end=10)
    members = [
        world.join("g", name, "t", offset_reset="earliest", client_id=f"c-{name}")
        for name in ("a", "b")
    ]
    with pytest.raises(GroupFullError):
        world.join("g", "c", "t")
    taken = members[0].acquire(4)["acquired"][0]
    number = taken[1]
    members[0].acknowledge((topic, number, 0, 0, "accept"))
    page = world.request(Api.DESCRIBE_GROUP, {"group": "g", "part": "members"})
    assert page["group"] == {
        "group": "g", "kind": "share", "state": "STABLE", "members": 2, "assignor": "", "epoch": 2,
        "rebalances": 0, "created_ms": 1_000_000,
    }  # fmt: skip
    assert [(row["member_id"], row["client_id"]) for row in page["members"]] == [
        ("a", "c-a"),
        ("b", "c-b"),
    ]
    page = world.request(Api.DESCRIBE_GROUP, {"group": "g", "part": "partitions"})
    row = page["partitions"][number]
    assert (row["start_offset"], row["in_flight"], row["deliveries"], row["lag"], row["end"]) == (
        1,
        3,
        1,
        9,
        10,
    )
    assert (
        world.request(Api.DESCRIBE_GROUP, {"group": "g", "part": "partitions", "after": ["t", 1]})[
            "partitions"
        ][0]["partition"]
        == 2
    )
    assert world.request(Api.FETCH_OFFSETS,
    {"group": "g", "partitions": [["t", number], ["t", 9]]})["offsets"] == [
        ["t", number, 1, -1, "", 0], ["t", 9, -1, -1, "", 0],
    ]  # fmt: skip
    move = {"group": "g", "offsets": [["t", number, 5, ""], ["t", 7, 0, ""], ["t", 2, 11, ""]]}
    with pytest.raises(GroupNotEmptyError):
        world.request(Api.ALTER_GROUP_OFFSETS, move)
    with pytest.raises(GroupNotEmptyError):
        world.groups.delete("g", world.now_ns)
    for member in members:
        member.heartbeat(-1)
    assert world.groups.summary("g")["state"] == "EMPTY"
    refused = world.request(Api.ALTER_GROUP_OFFSETS, move)["refused"]
    assert [run[:3] for run in refused] == [
        ["t", 7, int(ErrorCode.UNKNOWN_TOPIC)],
        ["t", 2, int(ErrorCode.OFFSET_OUT_OF_RANGE)],
    ]
    world.restart()
    assert [
        run for run in world.join("g", "z", "t").acquire(100)["acquired"] if run[1] == number
    ] == [[topic, number, 5, 9, 1]]
    world.request(Api.GROUP_HEARTBEAT, {"group": "g", "member_id": "z", "member_epoch": -1})
    world.groups.delete("g", world.now_ns)
    world.commit()
    world.restart()
    assert not world.groups.has("g")
    assert world.store.share_states(1) == []
    with pytest.raises(UnknownGroupError):
        world.request(Api.DESCRIBE_GROUP, {"group": "g"})
    world.close()


def test_what_all_share_groups_together_take_is_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.topics.make("t", 3)
    world.topics.make("u", 2)
    monkeypatch.setattr(room, "SHARED_PARTITIONS_MAX", 7)
    first = world.join("a", "m", "t")
    world.join("b", "m", "t")
    with pytest.raises(GroupFullError, match="delete unused share groups"):
        world.join("c", "m", "u")
    assert world.groups.count() == 2
    with pytest.raises(GroupFullError, match="2 more exceed"):
        world.request(Api.GROUP_HEARTBEAT, first.named(kind="share", topics=["t", "u"]))
    world.join("b", "other", "t")
    first.heartbeat(-1)
    world.groups.delete("a", world.now_ns)
    world.commit()
    world.advance(room.COUNT_NS)
    world.join("c", "m", "u")
    monkeypatch.setattr(room, "MEMBERS_IN_ALL_MAX", 3)
    with pytest.raises(GroupFullError, match="3 members"):
        world.join("c", "n", "u")
    world.join("c", "m", "u")
    monkeypatch.setattr(room, "SUBSCRIPTIONS_MAX_BYTES", 3_000)
    monkeypatch.setattr(room, "MEMBERS_IN_ALL_MAX", 10)
    world.join("c", "n", "u")
    with pytest.raises(GroupFullError, match="subscribe to fewer"):
        world.join("c", "o", "u", *(f"{number:0100d}" for number in range(20)))
    world.restart()
    world.join("c", "o", "u")


def test_a_member_belongs_to_the_user_who_has_joined(world: World) -> None:
    topic = world.topics.make("t", end=10)
    mine = world.join("g", "m", "t", offset_reset="earliest", user="a")
    world.restart()
    other = {"group": "g", "kind": "share", "member_id": "m", "user": "b", "topics": ["t"]}
    entry = [topic, 0, 0, 0, "accept"]
    for api, epoch, more in (
        (Api.SHARE_ACQUIRE, mine.epoch, {"max_records": 5}),
        (Api.SHARE_ACKNOWLEDGE, mine.epoch, {"acknowledge": [entry]}),
        (Api.GROUP_HEARTBEAT, mine.epoch, {}),
        (Api.GROUP_HEARTBEAT, 0, {}),
        (Api.GROUP_HEARTBEAT, -1, {}),
    ):
        with pytest.raises(NotAuthorizedError, match="another user"):
            world.request(api, {**other, **more, "member_epoch": epoch})
        world.store.rollback()
        world.groups.drain_answers()
    with pytest.raises(NotAuthorizedError):
        world.groups.prepare("g", {**other, "member_epoch": mine.epoch, "acknowledge": [entry]})
    own = {**other, "user": "a", "member_epoch": mine.epoch, "max_records": 5}
    assert world.request(Api.SHARE_ACQUIRE, own)["acquired"] == [[topic, 0, 0, 4, 1]]


def test_a_member_from_before_there_were_users_belongs_to_who_sends_its_heartbeat(
    world: World,
) -> None:
    world.topics.make("t", end=10)
    member = world.join("g", "m", "t")
    request = {"group": "g", "kind": "share", "member_id": "m", "member_epoch": member.epoch}
    world.request(Api.GROUP_HEARTBEAT, {**request, "user": "a"})
    with pytest.raises(NotAuthorizedError):
        world.request(Api.GROUP_HEARTBEAT, {**request, "user": "b"})
