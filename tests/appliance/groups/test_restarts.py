"""Members of a consumer group whose connection, front or process of groups is lost, and steps whose
commit fails.
"""

from __future__ import annotations

from appliance.groups.base.messages import SessionKey
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench, Client, settle


def test_a_restart_keeps_epochs_assignments_and_offsets(bench: Bench) -> None:
    one, two = (
        Client(bench, member_id="m1", session_timeout_ms=6_000),
        Client(bench, member_id="m2"),
    )
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
    (answer,) = bench.service.drain_answers()
    assert answer.code == ErrorCode.STORAGE_ERROR
    assert bench.summary("billing")["members"] == 1
    one.heartbeat()
    assert one.epoch == 1
    settle(one, two)
    assert len(two.partitions) == 2


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
    assert len(one.partitions) == 4, (
        "a consumer that was killed costs a second, not its session timeout"
    )
    bench.service.session_closed(SessionKey(0, 424242), bench.now_ns)  # of nobody


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
    one, two = (
        Client(bench, member_id="m1", session_timeout_ms=10_000),
        Client(bench, member_id="m2"),
    )
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
    assert bench.summary("billing")["members"] == 1, (
        "ten seconds since m1 was heard, not since the rollback"
    )


def test_what_a_member_asked_for_last_is_what_is_kept(bench: Bench) -> None:
    bench.topics.create("clicks", 2)
    one = Client(bench, client_id="app", session_timeout_ms=10_000)
    settle(one, Client(bench, member_id="m2"))
    one.heartbeat(topics=["clicks"])
    settle(one)
    bench.restart()
    member, _ = bench.ask(Api.DESCRIBE_GROUP, group="billing")["members"]
    assert (member["topics"], member["client_id"], member["session_timeout_ms"]) == (
        ["clicks"],
        "app",
        10_000,
    )
    one.more["session_timeout_ms"], one.topics, one.epoch = 20_000, ["orders", "clicks"], 0
    one.heartbeat()
    bench.restart()
    member, _ = bench.ask(Api.DESCRIBE_GROUP, group="billing")["members"]
    assert (member["topics"], member["session_timeout_ms"]) == (["clicks", "orders"], 20_000)


def test_members_of_a_front_that_was_killed_have_a_heartbeats_time_and_four_seconds_more(
    bench: Bench,
) -> None:
    one, two = (
        Client(bench, member_id="m1", heartbeat_interval_ms=3_000),
        Client(bench, member_id="m2", heartbeat_interval_ms=3_000),
    )
    settle(one, two)
    for client in (one, two):
        bench.service.session_closed(client.session, bench.now_ns, with_front=True)
    bench.wait(7.9)
    one.session = SessionKey(0, 99)
    one.heartbeat()
    assert bench.summary("billing")["members"] == 2
    bench.wait(0.2)
    assert bench.summary("billing")["members"] == 1
