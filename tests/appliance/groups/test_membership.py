"""Members of a consumer group: they join, stay, leave, die, and are fenced."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.groups import heartbeats
from appliance.groups.messages import SessionKey
from tailrace.errors import (
    FencedMemberError,
    InstanceIdInUseError,
    InvalidRequestError,
    TailraceError,
    UnknownMemberError,
)
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import Api
from tests.appliance.groups.kit import Bench, Client, FakeTopics, settle


def test_the_first_member_gets_all_partitions_with_its_first_answer(bench: Bench) -> None:
    one = Client(bench)
    answer = one.heartbeat()
    assert answer["member_epoch"] == 1
    assert one.partitions == [("orders", partition) for partition in range(4)]
    assert "assignment" in one.last
    one.heartbeat()
    assert one.last["assignment"] == answer["assignment"], "an answer to a heartbeat with `owned` has the assignment"
    one.heartbeat()
    assert "assignment" not in one.last, "it is what the member said it owns"
    assert bench.summary("billing")["state"] == "STABLE"


def test_a_second_member_takes_over_what_the_first_has_given_back(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1"), Client(bench, member_id="m2")
    settle(one)
    two.heartbeat()
    assert two.partitions == [], "all of them are still the first one's"
    assert bench.summary("billing")["state"] == "RECONCILING"
    assert [push.session for push in bench.pushes] == [one.session.session], "the first one hears that it has to give something back"
    bench.pushes.clear()
    kept = one.heartbeat()["assignment"]
    assert sum(map(len, kept.values())) == 2
    two.heartbeat()
    assert two.partitions == []
    one.heartbeat()
    assert [push.session for push in bench.pushes] == [two.session.session], "what the first one gave back is free"
    two.heartbeat()
    assert len(two.partitions) == 2
    settle(one, two)
    assert sorted(one.partitions + two.partitions) == [("orders", partition) for partition in range(4)]
    assert bench.summary("billing")["state"] == "STABLE"


def test_a_member_that_leaves_frees_its_partitions_at_once(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1"), Client(bench, member_id="m2")
    settle(one, two)
    bench.pushes.clear()
    two.leave()
    assert [push.session for push in bench.pushes] == [one.session.session]
    one.heartbeat()
    assert len(one.partitions) == 4
    with pytest.raises(UnknownMemberError):
        two.heartbeat()


def test_a_silent_member_is_removed_after_its_session_timeout(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1", session_timeout_ms=10_000), Client(bench, member_id="m2", session_timeout_ms=6_000)
    settle(one, two)
    bench.wait(5)
    one.heartbeat()
    assert len(one.partitions) == 2
    bench.wait(1.1)
    one.heartbeat()
    assert len(one.partitions) == 4
    with pytest.raises(UnknownMemberError):
        two.heartbeat()


def test_a_restart_keeps_epochs_assignments_and_offsets(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1", session_timeout_ms=6_000), Client(bench, member_id="m2")
    settle(one, two)
    topic, partition = one.partitions[0]
    assert one.commit([topic, partition, 17, -1, "half"]) == []
    before = one.epoch, one.partitions, two.partitions
    bench.restart()
    settle(one, two)
    assert (one.epoch, one.partitions, two.partitions) == before
    assert bench.offset("billing", topic, partition) == 17
    bench.restart()
    bench.wait(6.1)
    two.heartbeat()
    assert len(two.partitions) == 4, "sessions begin anew at a restart, and end"


def test_a_commit_that_fails_leaves_the_group_as_the_disk_has_it(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1"), Client(bench, member_id="m2")
    settle(one)
    bench.send(Api.GROUP_HEARTBEAT, two.request(), two.session)
    bench.service.settle()
    bench.store.rollback()
    bench.service.rolled_back(bench.now_ns)
    (answer,) = bench.service.take_answers()
    assert answer.code == ErrorCode.STORAGE_ERROR
    assert bench.summary("billing")["members"] == 1
    one.heartbeat()
    assert one.epoch == 1
    settle(one, two)
    assert len(two.partitions) == 2


def test_a_heartbeat_of_a_past_or_future_epoch_is_fenced(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    for number in range(2, 5):
        settle(one, Client(bench, member_id=f"m{number}"))
    for epoch in (1, one.epoch + 1):
        with pytest.raises(FencedMemberError):
            bench.ask(Api.GROUP_HEARTBEAT, one.session, group="billing", member_id="m1", member_epoch=epoch)
    one.heartbeat()


def test_two_members_with_one_instance_id(bench: Bench) -> None:
    one = Client(bench, member_id="m1", instance_id="pod-0")
    settle(one)
    two = Client(bench, member_id="m2", instance_id="pod-0")
    with pytest.raises(InstanceIdInUseError, match="pod-0"):
        two.heartbeat()
    bench.service.session_closed(one.session, bench.now_ns)
    epoch = one.epoch
    two.heartbeat()
    assert len(two.partitions) == 4
    assert two.epoch == epoch, "it has the old one's place: no rebalance"
    with pytest.raises(FencedMemberError, match="m2"):
        one.heartbeat(instance_id="pod-0")
    assert bench.summary("billing")["members"] == 1


def test_commits_are_fenced_by_ownership(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1"), Client(bench, member_id="m2")
    settle(one, two)
    mine, other = one.partitions[0], two.partitions[0]
    assert one.commit([*mine, 5]) == []
    ((topic, partition, code, sentence),) = one.commit([*other, 7], [*mine, 6])
    assert ((topic, partition), code) == (other, ErrorCode.PARTITION_NOT_OWNED)
    assert "m2" in sentence
    assert (bench.offset("billing", *mine), bench.offset("billing", *other)) == (6, -1)
    with pytest.raises(TailraceError) as caught:
        bench.ask(Api.COMMIT_OFFSETS, group="billing", member_id="m1", member_epoch=one.epoch + 1, offsets=[[*mine, 9]])
    assert caught.value.code == ErrorCode.FENCED_MEMBER
    ((*_, code, _),) = bench.ask(Api.COMMIT_OFFSETS, group="billing", offsets=[[*mine, 9]])["refused"]
    assert code == ErrorCode.PARTITION_NOT_OWNED, "from outside only what nobody owns"


def test_an_instance_that_goes_for_a_while_keeps_its_partitions(bench: Bench) -> None:
    one = Client(bench, member_id="m1", instance_id="pod-0", session_timeout_ms=10_000)
    two = Client(bench, member_id="m2", instance_id="pod-1")
    settle(one, two)
    epoch, mine = one.epoch, one.partitions
    one.leave(-2)
    bench.wait(5)
    two.heartbeat()
    assert len(two.partitions) == 2, "they wait for pod-0"
    with pytest.raises(FencedMemberError):
        one.heartbeat()
    successor = Client(bench, member_id="m3", instance_id="pod-0", session_timeout_ms=10_000)
    settle(successor, two)
    assert (successor.epoch, successor.partitions) == (epoch, mine), "no rebalance"
    successor.leave(-2)
    bench.wait(11)
    settle(two)
    assert len(two.partitions) == 4
    dynamic = Client(bench, member_id="m4")
    dynamic.heartbeat()
    with pytest.raises(InvalidRequestError, match="instance_id"):
        dynamic.leave(-2)


def test_after_a_restart_an_instance_id_is_free_when_its_member_does_not_come(bench: Bench) -> None:
    one = Client(bench, member_id="m1", instance_id="pod-0")
    settle(one)
    bench.restart()
    two = Client(bench, member_id="m2", instance_id="pod-0")
    with pytest.raises(TailraceError) as caught:
        two.heartbeat()
    assert caught.value.code == ErrorCode.NOT_READY, "m1 may live: ask again"
    bench.wait(1.1)
    two.heartbeat()
    assert len(two.partitions) == 4
    bench.restart()
    two.heartbeat()
    bench.wait(1.1)
    with pytest.raises(InstanceIdInUseError):
        Client(bench, member_id="m3", instance_id="pod-0").heartbeat()


def test_a_dynamic_member_whose_connection_closed_has_a_moment_to_come_back(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1"), Client(bench, member_id="m2")
    settle(one, two)
    bench.service.session_closed(one.session, bench.now_ns)
    bench.wait(0.9)
    one.session = SessionKey(1, 77)
    one.heartbeat()
    bench.wait(2)
    one.heartbeat()
    bench.service.session_closed(two.session, bench.now_ns)
    bench.wait(1.1)
    one.heartbeat()
    assert len(one.partitions) == 4, "a consumer that was killed costs a second, not its session timeout"
    bench.service.session_closed(SessionKey(0, 424242), bench.now_ns)  # of nobody


def test_a_static_member_whose_connection_closed_keeps_its_session_timeout(bench: Bench) -> None:
    one = Client(bench, member_id="m1", instance_id="pod-0", session_timeout_ms=10_000)
    two = Client(bench, member_id="m2")
    settle(one, two)
    bench.service.session_closed(one.session, bench.now_ns)
    bench.wait(9)
    two.heartbeat()
    assert len(two.partitions) == 2
    bench.wait(1.1)
    two.heartbeat()
    assert len(two.partitions) == 4


def test_a_member_that_gives_nothing_back_is_named_and_then_removed(bench: Bench) -> None:
    one = Client(bench, member_id="m1", rebalance_timeout_ms=60_000)
    two = Client(bench, member_id="m2")
    settle(one)
    two.heartbeat()

    def beat_without_polling(seconds: int) -> None:
        for _ in range(seconds):
            bench.wait(1)
            two.heartbeat()
            bench.ask(Api.GROUP_HEARTBEAT, one.session, group="billing", member_id="m1", member_epoch=one.epoch)

    beat_without_polling(20)
    members = {member["member_id"]: member for member in bench.ask(Api.DESCRIBE_GROUP, group="billing", part="members")["members"]}
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


def test_a_silent_member_is_named_before_it_is_removed(bench: Bench) -> None:
    one = Client(bench, session_timeout_ms=45_000, heartbeat_interval_ms=3_000)
    settle(one)
    bench.wait(7)
    (member,) = bench.ask(Api.DESCRIBE_GROUP, group="billing")["members"]
    assert member["stuck"].startswith("has sent no heartbeat for 7 s: it is removed in 3")
    assert member["last_heartbeat_ms_ago"] == 7_000


def test_subscriptions_change_while_a_member_stays(bench: Bench) -> None:
    bench.topics.create("clicks", 2)
    one = Client(bench)
    settle(one)
    one.heartbeat(topics=["orders", "clicks", "later", "clicks"])
    settle(one)
    assert {topic for topic, _ in one.partitions} == {"orders", "clicks"}
    bench.topics.create("later", 1)
    bench.service.topics_changed(bench.now_ns)
    settle(one)
    assert ("later", 0) in one.partitions
    one.heartbeat(topics=[])
    settle(one)
    assert one.partitions == []


def test_topics_that_grow_go_and_pause_are_told(bench: Bench) -> None:
    one = Client(bench)
    other = Client(bench, group="other", member_id="m2", topics=[], follows_catalog=True)
    settle(one, other)
    bench.pushes.clear()
    bench.topics.grow("orders", 6)
    bench.service.topics_changed(bench.now_ns)
    bench.finish_step()
    assert {push.session for push in bench.pushes} == {one.session.session, other.session.session}
    before = other.last["catalog_version"]
    settle(one, other)
    assert other.last["catalog_version"] > before
    assert len(one.partitions) == 6
    bench.pushes.clear()
    bench.topics.set("orders", delivery_paused=True)
    bench.service.topics_changed(bench.now_ns)
    bench.finish_step()
    assert one.session.session in {push.session for push in bench.pushes}
    epoch = one.epoch
    one.heartbeat()
    assert one.last["paused_topics"] == [bench.topics.id_of("orders")]
    assert one.epoch == epoch, "a pause is no rebalance"
    bench.topics.delete("orders")
    bench.service.topics_changed(bench.now_ns)
    settle(one)
    assert (one.partitions, one.last["paused_topics"]) == ([], [])


def test_topics_that_change_while_the_process_is_down_are_met_at_its_start(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    bench.topics.grow("orders", 5)
    bench.restart()
    settle(one)
    assert len(one.partitions) == 5


def test_an_answer_that_was_lost_costs_nothing(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1"), Client(bench, member_id="m2")
    settle(one)
    two.heartbeat()
    lost = one.request()
    bench.ask(Api.GROUP_HEARTBEAT, one.session, **lost)
    one.heartbeat(owned=one.owned_by_topic())
    settle(one, two)
    two.leave()
    epoch = one.epoch
    bench.ask(Api.GROUP_HEARTBEAT, one.session, **one.request())
    one.heartbeat(member_epoch=epoch, owned=one.owned_by_topic())
    assert one.epoch == epoch + 1
    join = Client(bench, member_id="m3")
    bench.ask(Api.GROUP_HEARTBEAT, join.session, **join.request())
    settle(one, join)
    assert len(join.partitions) == 2
    two.leave()  # what has left can leave again


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
    assert sorted(partition for one in clients for partition in one.partitions) == [("orders", number) for number in range(4)]


def test_a_heartbeat_without_news_writes_nothing(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    one.heartbeat()
    bench.wait(3)
    bench.send(Api.GROUP_HEARTBEAT, one.request(), one.session)
    bench.service.settle()
    assert not bench.store.is_in_transaction
    bench.finish_step()
    bench.wait(43)
    one.heartbeat()
    assert bench.summary("billing")["members"] == 1, "it was heard, all the same"


def test_a_join_behind_a_leave_in_the_same_step(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    leave = {"group": "billing", "member_id": "m1", "member_epoch": -1}
    stays = bench.send(Api.GROUP_HEARTBEAT, {**one.request(), "owned": {}}, one.session)
    bench.send(Api.GROUP_HEARTBEAT, leave, one.session)
    assert bench.finish_step()[stays].code == ErrorCode.UNKNOWN_MEMBER
    one.epoch = 0
    bench.send(Api.GROUP_HEARTBEAT, leave, one.session)
    one.heartbeat()
    assert len(one.partitions) == 4


def test_a_pause_holds_through_restarts_and_rollbacks(bench: Bench) -> None:
    one = Client(bench)
    bench.topics.set("orders", delivery_paused=True)
    settle(one)
    paused = [bench.topics.id_of("orders")]
    assert one.last["paused_topics"] == paused
    bench.restart()
    assert one.heartbeat()["paused_topics"] == paused
    bench.send(Api.GROUP_HEARTBEAT, {**one.request(), "topics": ["orders", "later"]}, one.session)
    bench.service.settle()
    bench.store.rollback()
    bench.service.rolled_back(bench.now_ns)
    bench.finish_step()
    assert one.heartbeat()["paused_topics"] == paused


def test_when_one_of_200_members_dies_five_partitions_change_hands_and_no_other_stops(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeTopics(**{f"t{number}": 100 for number in range(10)}))
    names = [f"t{number}" for number in range(10)]
    clients = [Client(bench, member_id=f"m{number:03d}", topics=names, session=number) for number in range(200)]

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
    assert len(pushed) == 5, "those who get one of its partitions hear of it at once, nobody else is woken"
    beat([one for one in left if one.session.session in pushed])
    assert sum(len(one.owned) for one in left) == 1_000, "every partition is owned again after one heartbeat of those"
    beat(left)
    assert all(before[one.member_id] <= one.owned for one in left), "what a member keeps it never gives up"
    bench.close()


def test_a_member_is_where_it_was_heard_last(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1"), Client(bench, member_id="m2")
    settle(one, two)
    one.heartbeat()
    old, one.session = one.session, SessionKey(1, 77)
    one.heartbeat()
    bench.service.session_closed(old, bench.now_ns)
    bench.wait(2)
    one.heartbeat()
    assert len(one.partitions) == 2, "a connection that it has left is not its own any more"
    bench.pushes.clear()
    two.leave()
    assert [push.session for push in bench.pushes] == [77]
    bench.service.session_closed(one.session, bench.now_ns)
    one.heartbeat()
    bench.wait(2)
    one.heartbeat()
    assert len(one.partitions) == 4, "it was heard behind the close"
    bench.service.session_closed(one.session, bench.now_ns)
    bench.wait(2)
    assert bench.summary("billing")["members"] == 0


def test_connections_and_timers_are_known_when_a_step_was_rolled_back(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1", session_timeout_ms=10_000), Client(bench, member_id="m2")
    settle(one, two)
    bench.wait(4)
    bench.send(Api.GROUP_HEARTBEAT, {**two.request(), "topics": []}, two.session)
    bench.service.settle()
    bench.store.rollback()
    bench.service.rolled_back(bench.now_ns)
    bench.finish_step()
    bench.pushes.clear()
    Client(bench, member_id="m3").heartbeat()
    assert {push.session for push in bench.pushes} <= {one.session.session, two.session.session}
    assert bench.pushes
    two.is_to_report = True
    bench.service.session_closed(two.session, bench.now_ns)
    bench.wait(1.1)
    assert bench.summary("billing")["members"] == 2, "m2 went with its connection"
    bench.wait(5)
    assert bench.summary("billing")["members"] == 1, "ten seconds since m1 was heard, not since the rollback"


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


def test_what_a_member_asked_for_last_is_what_is_kept(bench: Bench) -> None:
    bench.topics.create("clicks", 2)
    one = Client(bench, client_id="app", session_timeout_ms=10_000)
    settle(one, Client(bench, member_id="m2"))
    one.heartbeat(topics=["clicks"])
    settle(one)
    bench.restart()
    member, _ = bench.ask(Api.DESCRIBE_GROUP, group="billing")["members"]
    assert (member["topics"], member["client_id"], member["session_timeout_ms"]) == (["clicks"], "app", 10_000)
    one.more["session_timeout_ms"], one.topics, one.epoch = 20_000, ["orders", "clicks"], 0
    one.heartbeat()
    bench.restart()
    member, _ = bench.ask(Api.DESCRIBE_GROUP, group="billing")["members"]
    assert (member["topics"], member["session_timeout_ms"]) == (["clicks", "orders"], 20_000)


def test_members_of_a_front_that_was_killed_have_a_heartbeats_time_and_four_seconds_more(bench: Bench) -> None:
    one, two = Client(bench, member_id="m1", heartbeat_interval_ms=3_000), Client(bench, member_id="m2", heartbeat_interval_ms=3_000)
    settle(one, two)
    for client in (one, two):
        bench.service.session_closed(client.session, bench.now_ns, with_front=True)
    bench.wait(7.9)
    one.session = SessionKey(0, 99)
    one.heartbeat()
    assert bench.summary("billing")["members"] == 2
    bench.wait(0.2)
    assert bench.summary("billing")["members"] == 1


def test_a_large_group_is_assigned_anew_at_intervals(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "ASSIGNED_AT_ONCE_MEMBERS", 2)
    monkeypatch.setattr(heartbeats, "ASSIGN_PAUSE_NS_PER_MEMBER", 10_000_000)
    clients = [Client(bench, member_id=f"m{number}") for number in range(6)]
    for one in clients[:3]:
        one.heartbeat()
    assert bench.summary("billing")["epoch"] == 3
    for one in clients[3:]:
        one.heartbeat()
        assert (one.epoch, one.partitions) == (3, [])
    assert (bench.summary("billing")["epoch"], bench.summary("billing")["state"]) == (3, "ASSIGNING")
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


def test_a_member_from_which_something_is_taken_back_before_it_took_it_need_not_say_so(bench: Bench) -> None:
    one = Client(bench, member_id="m1")
    settle(one)
    two = Client(bench, member_id="m2")
    two.heartbeat()
    for _ in range(2):
        one.heartbeat()

    def hear() -> set[int]:
        """m2 asks, and says nothing of what it has: nothing, as it said when it joined."""
        answer = bench.ask(Api.GROUP_HEARTBEAT, two.session, group="billing", member_id="m2", member_epoch=two.epoch)
        two.epoch = answer["member_epoch"]
        return {partition for partitions in answer["assignment"].values() for partition in partitions}

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
