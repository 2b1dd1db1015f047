"""Rebalances of a consumer group: who gives up what, who is told, and who gets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.groups.consumer import heartbeats
from tailrace.core.errors import UnknownMemberError
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench, Client, FakeTopics, settle


def test_a_second_member_takes_over_what_the_first_has_given_back(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1"), Client(bench, member_id="m2")
    settle(one)
    two.heartbeat()
    assert two.partitions == [], "all of them are still the first one's"
    assert bench.summary("billing")["state"] == "RECONCILING"
    assert [push.session for push in bench.pushes] == [one.session.session], (
        "the first one hears that it has to give something back"
    )
    bench.pushes.clear()
    kept = one.heartbeat()["assignment"]
    assert sum(map(len, kept.values())) == 2
    two.heartbeat()
    assert two.partitions == []
    one.heartbeat()
    assert [push.session for push in bench.pushes] == [two.session.session], (
        "what the first one gave back is free"
    )
    two.heartbeat()
    assert len(two.partitions) == 2
    settle(one, two)
    assert sorted(one.partitions + two.partitions) == [
        ("orders", partition) for partition in range(4)
    ]
    assert bench.summary("billing")["state"] == "STABLE"


def test_a_member_that_gives_nothing_back_is_named_and_then_removed(bench: Bench) -> None:
    one = Client(bench, member_id="m1", rebalance_timeout_ms=60_000)
    two = Client(bench, member_id="m2")
    settle(one)
    two.heartbeat()

    def beat_without_polling(seconds: int) -> None:
        for _ in range(seconds):
            bench.wait(1)
            two.heartbeat()
            bench.ask(
                Api.GROUP_HEARTBEAT,
                one.session,
                group="billing",
                member_id="m1",
                member_epoch=one.epoch,
            )

    beat_without_polling(20)
    members = {
        member["member_id"]: member
        for member in bench.ask(Api.DESCRIBE_GROUP, group="billing", part="members")["members"]
    }
    assert members["m2"]["stuck"] == ""
    assert members["m1"]["state"] == "REVOKING"
    assert "has not given back orders-" in members["m1"]["stuck"]
    assert "removed in 4" in members["m1"]["stuck"]
    assert two.partitions == []
    beat_without_polling(39)
    with pytest.raises(UnknownMemberError):
        beat_without_polling(2)
    two.heartbeat()
    assert len(two.partitions) == 4


def test_a_member_that_joins_again_begins_anew(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1"), Client(bench, member_id="m2")
    settle(one, two)
    epoch = bench.summary("billing")["epoch"]
    one.epoch = 0
    one.heartbeat()
    assert len(one.partitions) == 2
    settle(one, two)
    assert bench.summary("billing")["epoch"] == epoch, "nobody else has to move"


def test_many_joins_in_one_step_are_one_rebalance(bench: Bench) -> None:
    clients = [Client(bench, member_id=f"m{number:03d}") for number in range(50)]
    sent = {bench.send(Api.GROUP_HEARTBEAT, one.request(), one.session): one for one in clients}
    for correlation_id, answer in bench.finish_step().items():
        sent[correlation_id].take(answer)
    assert bench.summary("billing")["epoch"] == 1
    assert sorted(partition for one in clients for partition in one.partitions) == [
        ("orders", number) for number in range(4)
    ]


def test_when_one_of_200_members_dies_five_partitions_change_hands_and_no_other_stops(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, FakeTopics(**{f"t{number}": 100 for number in range(10)}))
    names = [f"t{number}" for number in range(10)]
    clients = [
        Client(bench, member_id=f"m{number:03d}", topics=names, session=number)
        for number in range(200)
    ]

    def beat(some: list[Client]) -> None:
        sent = {bench.send(Api.GROUP_HEARTBEAT, one.request(), one.session): one for one in some}
        for correlation_id, answer in bench.finish_step().items():
            sent[correlation_id].take(answer)

    for _ in range(4):
        beat(clients)
    assert {len(one.owned) for one in clients} == {5}
    dead, left = clients[77], [one for one in clients if one is not clients[77]]
    before = {one.member_id: set(one.owned) for one in left}
    bench.pushes.clear()
    bench.service.session_closed(dead.session, bench.now_ns)
    bench.wait(1.001)
    pushed = {push.session for push in bench.pushes}
    assert len(pushed) == 5, (
        "those who get one of its partitions hear of it at once, nobody else is woken"
    )
    beat([one for one in left if one.session.session in pushed])
    assert sum(len(one.owned) for one in left) == 1_000, (
        "every partition is owned again after one heartbeat of those"
    )
    beat(left)
    assert all(before[one.member_id] <= one.owned for one in left), (
        "what a member keeps it never gives up"
    )
    bench.close()


def test_who_is_heard_in_the_step_of_a_change_hears_of_it(bench: Bench) -> None:
    one = Client(bench, member_id="m1")
    settle(one)
    one.heartbeat()
    two = Client(bench, member_id="m2")
    bench.send(Api.GROUP_HEARTBEAT, two.request(), two.session)
    correlation_id = bench.send(Api.GROUP_HEARTBEAT, one.request(), one.session)
    answer = bench.finish_step()[correlation_id]
    assert sum(map(len, answer["assignment"].values())) == 2
    assert bench.pushes == [], "its answer has the news"


def test_a_large_group_is_assigned_anew_at_intervals(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "ASSIGNED_AT_ONCE_MEMBERS", 2)
    monkeypatch.setattr(heartbeats, "ASSIGN_PAUSE_NS_PER_MEMBER", 10_000_000)
    clients = [Client(bench, member_id=f"m{number}") for number in range(6)]
    for one in clients[:3]:
        one.heartbeat()
    assert bench.summary("billing")["epoch"] == 3
    for one in clients[3:]:
        one.heartbeat()
        assert (one.epoch, one.partitions) == (3, [])
    assert (bench.summary("billing")["epoch"], bench.summary("billing")["state"]) == (
        3,
        "ASSIGNING",
    )
    bench.restart()
    assert bench.summary("billing")["epoch"] == 4, "what was not assigned yet is at the next start"
    bench.wait(0.1)
    clients[0].leave()
    assert bench.summary("billing")["epoch"] == 5
    clients[1].leave()
    bench.pushes.clear()
    bench.wait(0.02)
    assert bench.summary("billing")["state"] == "ASSIGNING"
    bench.wait(0.02)
    assert bench.summary("billing")["epoch"] == 6
    settle(*clients[2:])
    assert [len(one.partitions) for one in clients[2:]] == [1, 1, 1, 1]
    for one in clients[2:]:
        one.leave()
    assert bench.summary("billing")["state"] == "EMPTY"


def test_a_member_from_which_something_is_taken_back_before_it_took_it_need_not_say_so(
    bench: Bench,
) -> None:
    one = Client(bench, member_id="m1")
    settle(one)
    two = Client(bench, member_id="m2")
    two.heartbeat()
    for _ in range(2):
        one.heartbeat()

    def hear() -> set[int]:
        """m2 asks, and says nothing of what it has: nothing, as it said when it joined."""
        answer = bench.ask(
            Api.GROUP_HEARTBEAT,
            two.session,
            group="billing",
            member_id="m2",
            member_epoch=two.epoch,
        )
        two.epoch = answer["member_epoch"]
        return {
            partition for partitions in answer["assignment"].values() for partition in partitions
        }

    told = hear()
    assert len(told) == 2
    three = Client(bench, member_id="m3")
    three.heartbeat()
    (taken_back,) = told - hear()
    three.heartbeat()
    assert three.partitions == [], "m2 may have taken it before it heard"
    assert hear() == told - {taken_back}
    three.heartbeat()
    assert three.partitions == [("orders", taken_back)]


def test_an_assignment_of_very_many_topics_is_told_without_their_names(tmp_path: Path) -> None:
    topics = FakeTopics(**{f"{number:03}_{'x' * 200}": 1 for number in range(200)})
    bench = Bench(tmp_path, topics, answer_max=24_000)
    one = Client(bench, topics=[topic.name for topic in topics.topics()])
    answer = one.heartbeat()
    assert sum(map(len, answer["assignment"].values())) == 200
    assert "topic_names" not in answer
    answer = one.heartbeat(topics=[topic.name for topic in topics.topics()][:20])
    assert set(answer["topic_names"]) == set(answer["assignment"])
    bench.close()
