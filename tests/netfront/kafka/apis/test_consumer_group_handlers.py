"""Patterns of members of Kafka's newer protocol are kept as long as the members, and no longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.groups import topic_patterns
from netfront.kafka.apis.groups.consumer_groups import heartbeat
from netfront.kafka.exchange.peers import Answer
from netfront.kafka.wire.errors import KafkaError
from shm.rights.authorizer import AclTable, Principal
from shm.runtime.timing_wheel import TimingWheel
from tailrace.core.error_codes import ErrorCode

SECOND_NS = 1_000_000_000
BEAT = {
    "group_id": "g", "member_id": "m", "member_epoch": 0, "instance_id": None,
    "rebalance_timeout_ms": -1, "subscribed_topic_names": None, "subscribed_topic_regex": None,
    "server_assignor": None, "topic_partitions": None,
}  # fmt: skip


class FakeGateway:
    """The services of a gateway whose coordinator answers with one code."""

    def __init__(self) -> None:
        names = ["a-1", "b-1"]
        self.services: Any = SimpleNamespace(
            state={},
            timers=TimingWheel(0),
            now_ns=SECOND_NS,
            settings={
                "group.session.timeout.min.ms": 1_000,
                "group.session.timeout.max.ms": 60_000,
                "groups.max": 2,
                "group.members.max": 10,
            },
            routes=SimpleNamespace(names=lambda: names),
        )

    def ask_json(self, _api: int, value: dict[str, Any]) -> dict[str, Any]:
        return value

    def beat(
        self, code: ErrorCode = ErrorCode.OK, kept: str = "", user: str = "", **fields: Any
    ) -> Any:
        """Returns what the coordinator was asked. `kept`: the pattern that it has kept."""
        peer: Any = self
        connection: Any = SimpleNamespace()
        principal = Principal(user, (), "", AclTable(), is_admin=True) if user else None
        steps = heartbeat(
            Call(self.services, connection, peer, 68, 1, "client", BEAT | fields, principal)
        )
        asked = next(steps)
        answer = {"member_id": "m", "member_epoch": 1, "message": "gone"}
        if kept:
            answer["pattern"] = kept
        try:
            steps.send(Answer(code, [orjson.dumps(answer)]))
        except StopIteration:
            return asked
        raise AssertionError("it waits")

    @property
    def members(self) -> list[str]:
        return [member for _, member in self.services.state["patterns"].keys_of("")]


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER])
def test_the_pattern_of_a_member_that_is_gone_is_forgotten(code: ErrorCode) -> None:
    gateway = FakeGateway()
    assert gateway.beat(subscribed_topic_regex="a-.*")["topics"] == ["a-1"]
    with pytest.raises(RefusedError):
        gateway.beat(ErrorCode.NOT_READY, member_epoch=1)
    assert gateway.members == ["m"]
    with pytest.raises(RefusedError):
        gateway.beat(code, member_epoch=1)
    assert gateway.members == []


def test_patterns_of_silent_members_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_patterns, "PATTERNS_MAX", 2)
    gateway = FakeGateway()
    for member in ("alive", "silent"):
        gateway.beat(member_id=member, subscribed_topic_regex="a-.*")
    gateway.services.now_ns += 50 * SECOND_NS
    gateway.beat(member_id="alive", member_epoch=1)
    with pytest.raises(RefusedError) as refused:
        gateway.beat(member_id="new", subscribed_topic_regex="b-.*")
    assert refused.value.code is KafkaError.GROUP_MAX_SIZE_REACHED
    gateway.services.now_ns += 11 * SECOND_NS
    assert gateway.beat(member_id="new", subscribed_topic_regex="b-.*")["topics"] == ["b-1"]
    assert gateway.members == ["alive", "new"]


@pytest.mark.parametrize(
    "fields",
    [{"subscribed_topic_regex": "b-.*"}, {"subscribed_topic_regex": ""}, {"member_epoch": -1}],
)
def test_the_pattern_of_a_member_is_not_changed_by_another_user_with_its_id(
    fields: dict[str, Any],
) -> None:
    gateway = FakeGateway()
    gateway.beat(user="alice", subscribed_topic_regex="a-.*")
    with pytest.raises(RefusedError):
        gateway.beat(ErrorCode.NOT_AUTHORIZED, user="bob", **fields)
    gateway.services.routes.names = lambda: ["a-1", "a-2", "b-1"]
    asked = gateway.beat(user="alice", member_epoch=1)
    assert asked["topics"] == ["a-1", "a-2"]
    gateway.services.routes.names = lambda: ["a-1", "b-1"]
    assert "topics" not in gateway.beat(user="bob", member_epoch=1)


def test_a_user_with_very_many_patterns_leaves_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_patterns, "PATTERNS_MAX", 3)
    gateway = FakeGateway()
    for member in ("1", "2", "3"):
        gateway.beat(user="bob", member_id=member, subscribed_topic_regex="b-.*")
    with pytest.raises(RefusedError) as refused:
        gateway.beat(user="bob", member_id="4", subscribed_topic_regex="b-.*")
    assert refused.value.code is KafkaError.GROUP_MAX_SIZE_REACHED
    gateway.beat(user="alice", subscribed_topic_regex="a-.*")
    patterns = gateway.services.state["patterns"]
    assert (patterns.size, patterns.keys_of("bob")) == (3, [("g", "2"), ("g", "3")])
    gateway.beat(user="bob", member_id="1", member_epoch=1, kept='["b-.*",[]]')
    assert patterns.keys_of("alice") == [("g", "m")]


def test_a_pattern_with_too_many_names_beside_it_is_refused() -> None:
    gateway = FakeGateway()
    names = [f"topic-{number:0200}" for number in range(20)]
    assert gateway.beat(
        subscribed_topic_regex="a-.*", subscribed_topic_names=["b-1"]
    )["pattern"] == '["a-.*",["b-1"]]'  # fmt: skip
    with pytest.raises(RefusedError, match="4096 are allowed") as refused:
        gateway.beat(subscribed_topic_regex="a-.*", subscribed_topic_names=names)
    assert refused.value.code is KafkaError.INVALID_REQUEST


def test_a_pattern_that_the_process_of_groups_returns_is_matched_again() -> None:
    gateway = FakeGateway()
    gateway.beat(member_epoch=1, kept='["a-.*",["b-1"]]')
    assert gateway.beat(member_epoch=1)["topics"] == ["a-1", "b-1"]
    damaged = FakeGateway()
    damaged.beat(member_epoch=1, kept='["(a*",[]]')
    assert "topics" not in damaged.beat(member_epoch=1)
