"""Handlers of classic groups whose connections are closed while they wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.groups.classic_groups import heartbeat, join_group
from netfront.kafka.apis.shared_state import classic_groups
from netfront.kafka.exchange.peers import Answer
from netfront.kafka.exchange.waiter import Task, Waiter
from netfront.kafka.groups.classic_group import INITIAL_DELAY_NS
from netfront.kafka.groups.classic_member import MS
from netfront.kafka.wire.errors import KafkaError
from shm.runtime.timing_wheel import TimingWheel
from tailrace.core.error_codes import ErrorCode

SETTINGS = {
    "groups.max": 2, "group.members.max": 10, "group.session.timeout.min.ms": 1_000,
    "group.session.timeout.max.ms": 60_000,
}  # fmt: skip
JOIN = {
    "group_id": "g", "session_timeout_ms": 10_000, "rebalance_timeout_ms": 60_000,
    "member_id": "", "protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b""}],
}  # fmt: skip


class FakeGateway:
    """The services of a gateway, whose front answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Waiter] = []
        self.requests: list[dict[str, Any]] = []
        self.services: Any = SimpleNamespace(
            state={}, timers=TimingWheel(0), now_ns=MS, settings=SETTINGS, own_peer=self
        )

    def ask_json(self, _api: int, value: dict[str, Any]) -> Waiter:
        self.requests.append(value)
        self.asked.append(Waiter())
        return self.asked[-1]

    def call(self, request: dict[str, Any], version: int = 3) -> Call:
        connection: Any = SimpleNamespace(address="host:1")
        peer: Any = self
        return Call(self.services, connection, peer, 11, version, "client", request)

    def pass_ns(self, duration_ns: int) -> None:
        self.services.now_ns += duration_ns
        for callback in self.services.timers.advance(self.services.now_ns):
            callback()


def test_a_join_that_ends_before_its_lease_leaves_no_group() -> None:
    gateway = FakeGateway()
    for name in ("a", "b", "c", "d"):
        steps = join_group(gateway.call({**JOIN, "group_id": name}))
        assert next(steps) is gateway.asked[-1]
        steps.close()
        assert classic_groups(gateway.services).get(name) is None


def test_a_join_that_ends_while_it_waits_leaves_its_member_for_the_session_timeout() -> None:
    gateway = FakeGateway()
    steps = join_group(gateway.call(JOIN))
    next(steps)
    steps.send(Answer(ErrorCode.OK, [b"{}"]))
    steps.close()
    group = classic_groups(gateway.services).get("g")
    assert group is not None
    assert len(group.members) == 1
    gateway.pass_ns(10_001 * MS)
    assert classic_groups(gateway.services).get("g") is None


def test_a_member_renews_the_lease_of_its_group() -> None:
    gateway = FakeGateway()
    steps = join_group(gateway.call(JOIN))
    next(steps)
    waiter = steps.send(Answer(ErrorCode.OK, [b"{}"]))
    gateway.pass_ns(INITIAL_DELAY_NS + MS)
    member_id = waiter.value["member_id"]
    request = {"group_id": "g", "generation_id": 1, "member_id": member_id}
    count = len(gateway.asked)
    gateway.pass_ns(9_000 * MS)
    for later_ns, asks in ((0, 0), (2_000 * MS, 1)):
        gateway.pass_ns(later_ns)
        beating = heartbeat(gateway.call(request))
        task_ends: list[Any] = []
        Task(beating, task_ends.append, task_ends.append).resume()
        for waiter in gateway.asked[count:]:
            waiter.complete(Answer(ErrorCode.OK, [b"{}"]))
        assert task_ends == [{"error_code": 0}]
        assert len(gateway.asked) - count == asks


def test_a_group_that_another_protocol_has_taken_lets_its_members_go() -> None:
    """The process of groups was restarted: it forgot the lease, and another member was faster."""
    gateway = FakeGateway()
    steps = join_group(gateway.call(JOIN))
    next(steps)
    waiter = steps.send(Answer(ErrorCode.OK, [b"{}"]))
    gateway.pass_ns(INITIAL_DELAY_NS + 11_000 * MS)
    request = {"group_id": "g", "generation_id": 1, "member_id": waiter.value["member_id"]}
    beating = heartbeat(gateway.call(request))
    next(beating)
    with pytest.raises(RefusedError) as refused:
        beating.send(Answer(ErrorCode.INVALID_GROUP, [b"it has other members"]))
    assert refused.value.code is KafkaError.UNKNOWN_MEMBER_ID
    assert classic_groups(gateway.services).get("g") is None


def test_the_lease_of_a_group_ends_with_its_last_member() -> None:
    """It lasted for up to a minute, in which operators were told that the group has members."""
    gateway = FakeGateway()
    steps = join_group(gateway.call(JOIN))
    next(steps)
    steps.send(Answer(ErrorCode.OK, [b"{}"]))
    gateway.pass_ns(INITIAL_DELAY_NS + MS)
    gateway.pass_ns(9_000 * MS)
    assert [each["member_epoch"] for each in gateway.requests] == [0]
    gateway.pass_ns(2_000 * MS)
    assert classic_groups(gateway.services).get("g") is None
    assert [each["member_epoch"] for each in gateway.requests] == [0, -1]
