"""Members of a consumer group: they join, stay, leave, die, and are fenced."""

from __future__ import annotations

import pytest

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    FencedMemberError,
    NotAuthorizedError,
    TailraceError,
    UnknownMemberError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench, Client, settle


def test_the_first_member_gets_all_partitions_with_its_first_answer(bench: Bench) -> None:
    one = Client(bench)
    answer = one.heartbeat()
    assert answer["member_epoch"] == 1
    assert one.partitions == [("orders", partition) for partition in range(4)]
    assert "assignment" in one.last
    one.heartbeat()
    assert one.last["assignment"] == answer["assignment"], (
        "an answer to a heartbeat with `owned` has the assignment"
    )
    one.heartbeat()
    assert "assignment" not in one.last, "it is what the member said it owns"
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
    one, two = (
        Client(bench, member_id="m1", session_timeout_ms=10_000),
        Client(bench, member_id="m2", session_timeout_ms=6_000),
    )
    settle(one, two)
    bench.wait(5)
    one.heartbeat()
    assert len(one.partitions) == 2
    bench.wait(1.1)
    one.heartbeat()
    assert len(one.partitions) == 4
    with pytest.raises(UnknownMemberError):
        two.heartbeat()


def test_a_heartbeat_of_a_past_or_future_epoch_is_fenced(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    for number in range(2, 5):
        settle(one, Client(bench, member_id=f"m{number}"))
    for epoch in (1, one.epoch + 1):
        with pytest.raises(FencedMemberError):
            bench.ask(
                Api.GROUP_HEARTBEAT,
                one.session,
                group="billing",
                member_id="m1",
                member_epoch=epoch,
            )
    one.heartbeat()


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
        bench.ask(
            Api.COMMIT_OFFSETS,
            group="billing",
            member_id="m1",
            member_epoch=one.epoch + 1,
            offsets=[[*mine, 9]],
        )
    assert caught.value.code == ErrorCode.FENCED_MEMBER
    ((*_, code, _),) = bench.ask(Api.COMMIT_OFFSETS, group="billing", offsets=[[*mine, 9]])[
        "refused"
    ]
    assert code == ErrorCode.PARTITION_NOT_OWNED, "from outside only what nobody owns"


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


def test_a_member_is_used_and_removed_by_its_user_alone(bench: Bench) -> None:
    """Heartbeats, commits and the place of a static member."""
    one = Client(bench, instance_id="i1", user="ann")
    settle(one)
    for api, fields in (
        (Api.GROUP_HEARTBEAT, {"member_epoch": one.epoch}),
        (Api.GROUP_HEARTBEAT, {"member_epoch": 0, "topics": ["orders"]}),
        (Api.GROUP_HEARTBEAT, {"member_epoch": -1}),
        (Api.COMMIT_OFFSETS, {"member_epoch": one.epoch, "offsets": []}),
    ):
        with pytest.raises(NotAuthorizedError, match="another user"):
            bench.ask(
                api, one.session._replace(session=9), group="billing", member_id="m1", user="bob",
                **fields,
            )  # fmt: skip
    one.leave(-2)
    with pytest.raises(NotAuthorizedError, match="instance id of your own"):
        Client(bench, member_id="m2", instance_id="i1", user="bob").heartbeat()
    again = Client(bench, member_id="m3", instance_id="i1", user="ann")
    settle(again)
    assert len(again.partitions) == 4


def test_a_member_of_an_appliance_without_users_belongs_to_the_first_user_who_uses_it(
    bench: Bench,
) -> None:
    one = Client(bench)
    settle(one)
    one.more["user"] = "ann"
    one.heartbeat(topics=["orders"])
    one.more["user"] = "bob"
    with pytest.raises(NotAuthorizedError):
        one.heartbeat(topics=["orders"])
