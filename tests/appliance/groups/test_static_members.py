"""Static members of a consumer group: an instance id has one member, and keeps its place through
restarts.
"""

from __future__ import annotations

import pytest

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    FencedMemberError,
    InstanceIdInUseError,
    InvalidRequestError,
    TailraceError,
)
from tests.appliance.groups.kit import Bench, Client, settle


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
