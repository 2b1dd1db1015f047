"""Members of a consumer group: they join, stay, leave, die, and are fenced."""

from __future__ import annotations

import pytest

from tailrace.errors import (
    FencedMemberError,
    InstanceIdInUseError,
    TailraceError,
    UnknownMemberError,
)
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import Api
from tests.appliance.groups.kit import Bench, Client, settle


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
