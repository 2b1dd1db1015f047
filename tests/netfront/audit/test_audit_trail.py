"""Audit at a front: administration waits for its line, data does not, and no event is lost that can
be kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from netfront.access.gate import Gate
from netfront.audit import audit_trail
from netfront.audit.audit_trail import ADMINISTRATION, without_secrets
from shm.messages.lane_messages import AUDIT_REQUEST
from shm.queues.lane import LaneMessage
from shm.rights.acl import checked_acl
from shm.rights.authorizer import AclTable, Principal
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api, encode_request
from tests.kit.stepped.fronts import FakeClient, FakeFront, message_of


class Auditor:
    """The controller's part: takes events, and answers as the test says."""

    def __init__(self, world: FakeFront) -> None:
        self.world = world
        self.events: list[dict[str, Any]] = []
        self.others: list[LaneMessage] = []
        self.code = ErrorCode.OK

    def work(self) -> None:
        self.world.settle()
        while (message := self.world.controller.requests.peek()) is not None:
            payload = bytes(message.payload)
            self.world.controller.take()
            if message.slot != AUDIT_REQUEST:
                self.others.append(message)
                continue
            if self.code is ErrorCode.OK:
                self.events += orjson.loads(payload)["events"]
                self.world.controller.answer(message, {})
            else:
                self.world.controller.refuse(message, self.code, "the disk is full")
            self.world.settle()

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]


@pytest.fixture
def world() -> FakeFront:
    return FakeFront(1, audit={"data": ["watched"]})


@pytest.fixture
def auditor(world: FakeFront) -> Auditor:
    return Auditor(world)


def test_administration_waits_until_its_event_is_written(
    world: FakeFront, auditor: Auditor
) -> None:
    client = world.connect(b"ops")
    request = {"topics": [{"name": "t"}]}
    asked = client.send_json(Api.DELETE_TOPICS, request)
    world.settle()
    assert auditor.others == []
    auditor.work()
    [message] = auditor.others
    assert message.slot == Api.DELETE_TOPICS
    world.controller.answer(message, {"results": []})
    auditor.work()
    assert client.heard()[asked][0] is ErrorCode.OK
    login, requested, result = sorted(auditor.events, key=lambda event: event["event"])
    assert login["event"] == "login"
    assert requested["request"] == request
    assert (result["event"], result["outcome"]) == ("result", "allowed")
    for event in (login, requested, result):
        assert (event["user"], event["client"]) == ("User:ANONYMOUS", "ops")
        assert event["address"] == "fake"
    assert requested["id"] == result["id"] == f"{asked:x}"


def test_administration_is_refused_while_the_log_cannot_be_written_and_data_goes_on(
    world: FakeFront, auditor: Auditor
) -> None:
    client = world.connect(b"ops")
    world.add_topic("t", 1)
    auditor.code = ErrorCode.AUDIT_UNAVAILABLE
    asked = client.send_json(Api.DELETE_TOPICS, {"topics": [{"name": "t"}]})
    looked = client.send_json(Api.METADATA, {"topics": ["t"]})
    auditor.work()
    answers = client.heard()
    assert answers[looked][0] is ErrorCode.OK
    assert answers[asked][0] is ErrorCode.AUDIT_UNAVAILABLE
    assert message_of(answers[asked]) == "the disk is full"
    assert auditor.others == []
    auditor.code = ErrorCode.OK
    for _ in range(3):
        world.step(after_ms=1_100)
        auditor.work()
    assert set(auditor.names()) == {"login", "result"}, "what could wait is written later"
    assert client.send_json(Api.DELETE_TOPICS, {"topics": []})
    auditor.work()
    assert len(auditor.others) == 1


def test_a_client_that_leaves_before_its_event_is_written_changes_nothing(
    world: FakeFront, auditor: Auditor
) -> None:
    client = world.connect(b"ops")
    client.send_json(Api.DELETE_TOPICS, {"topics": [{"name": "t"}]})
    world.settle()
    session = world.front._sessions.by_identity(b"ops")
    assert session is not None
    world.front._session_lifecycle.drop(session)
    auditor.work()
    assert auditor.others == []


def test_a_controller_that_ends_meanwhile_has_the_request_repeated(
    world: FakeFront, auditor: Auditor
) -> None:
    client = world.connect(b"ops")
    asked = client.send_json(Api.DELETE_TOPICS, {"topics": [{"name": "t"}]})
    world.settle()
    while world.controller.take() is not None:
        pass
    world.controller.restart()
    world.step(after_ms=100)
    world.settle()
    assert client.heard()[asked][0] is ErrorCode.AUDIT_UNAVAILABLE
    auditor.work()
    assert auditor.others == []


def test_events_beyond_the_bound_are_counted_and_the_count_is_written(
    world: FakeFront, auditor: Auditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_trail, "EVENTS_MAX", 3)
    auditor.code = ErrorCode.AUDIT_UNAVAILABLE
    for number in range(8):
        world.connect(b"client-%d" % number)
        auditor.work()
    auditor.code = ErrorCode.OK
    for _ in range(4):
        world.step(after_ms=1_100)
        auditor.work()
    dropped = sum(event.get("count", 0) for event in auditor.events)
    assert dropped > 0
    assert auditor.names().count("login") + dropped == 8


def test_access_to_watched_topics_is_written_once_for_a_connection(
    world: FakeFront, auditor: Auditor
) -> None:
    watched, other = world.add_topic("watched.t", 1)[0], world.add_topic("t", 1)[0]
    client = world.connect(b"reader")
    for _ in range(3):
        client.produce([(watched, b"x" * 200), (other, b"x" * 200)], acks=0)
        client.fetch([watched, other], max_wait_ms=0)
    auditor.work()
    accesses = [event for event in auditor.events if event["event"] == "access"]
    assert sorted((event["operation"], event["topic"]) for event in accesses) == [
        ("read", "watched.t"), ("write", "watched.t")
    ]  # fmt: skip


def test_topics_that_do_not_exist_or_are_not_watched_hide_no_access(
    world: FakeFront, auditor: Auditor
) -> None:
    others = [
        replace(world.add_topic("t", 1)[0], topic_id=number.to_bytes(16, "little"))
        for number in range(1 << 32, (1 << 32) + 1_500)
    ]
    client = world.connect(b"reader")
    for first in range(0, len(others), 500):
        client.fetch(others[first : first + 500], max_wait_ms=0)
    world.settle()
    watched = replace(others[0], topic="watched.t")
    client.fetch([watched], max_wait_ms=0)
    world.settle()
    world.routing.apply(watched)
    client.fetch([watched], max_wait_ms=0)
    auditor.work()
    assert auditor.names().count("access") == 1


def limited(world: FakeFront, client: FakeClient, *rules: tuple[str, str]) -> None:
    """Give the client a user that may do this to topic `watched.t`."""
    table = AclTable()
    for number, (operation, name) in enumerate(rules, 1):
        fields = {"principal": "User:a", "operation": operation, "resource_type": "topic"}
        table.add(checked_acl({**fields, "name": name}, number))
    gate = Gate("", lambda: 0)
    world.front._forwarding._gate = world.front._dispatcher._gate = gate
    session = world.front._sessions.by_identity(client.identity)
    assert session is not None
    session.principal = Principal("a", (), "fake", table, is_admin=False)


def test_access_that_is_refused_is_no_allowed_access(world: FakeFront, auditor: Auditor) -> None:
    watched = world.add_topic("watched.t", 1)[0]
    client = world.connect(b"reader")
    limited(world, client, ("describe", "watched.t"))
    for acks in (0, 1):
        client.produce([(watched, b"x" * 200)], acks=acks)
    client.fetch([watched], max_wait_ms=0)
    auditor.work()
    assert "access" not in auditor.names()
    limited(world, client, ("read", "watched.t"))
    client.fetch([watched], max_wait_ms=0)
    auditor.work()
    assert [e["operation"] for e in auditor.events if e["event"] == "access"] == ["read"]


def test_who_may_not_administer_writes_no_request_and_repeats_are_counted(
    world: FakeFront, auditor: Auditor
) -> None:
    client = world.connect(b"a")
    limited(world, client, ("read", "watched.t"))
    auditor.work()
    auditor.events.clear()
    for _ in range(30):
        asked = client.send_json(Api.DELETE_TOPICS, {"topics": [{"name": "t", "x": "y" * 3_000}]})
        auditor.work()
        assert client.heard()[asked][0] is ErrorCode.NOT_AUTHORIZED
    [denied] = auditor.events
    assert (denied["event"], denied["outcome"], denied["user"]) == ("denied", "denied", "User:a")
    assert "request" not in denied
    assert auditor.others == []
    world.step(after_ms=60_100)
    auditor.work()
    assert [event.get("repeats") for event in auditor.events] == [None, 29]
    for number in range(500):
        client.send_json(Api.DELETE_TOPICS, {"topics": [{"name": f"t{number}"}]})
        auditor.work()
    session = world.front._sessions.by_identity(b"a")
    assert session is not None
    world.front._session_lifecycle.drop(session)
    auditor.work()
    assert len(auditor.events) == 2 + audit_trail.DENIALS_MAX + 2
    assert auditor.events[-1]["repeats"] == 500 - audit_trail.DENIALS_MAX - 1


def test_who_has_no_session_writes_nothing(world: FakeFront, auditor: Auditor) -> None:
    for number in range(20):
        frames = encode_request(Api.DELETE_TOPICS, 1, number + 1, [b"{}"])
        world.transport.inbox.append([b"nobody", *(bytes(frame) for frame in frames)])
    auditor.work()
    assert auditor.events == []


def test_the_events_of_one_session_leave_room_for_others(
    world: FakeFront, auditor: Auditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_trail, "SESSION_EVENTS_MAX", 5)
    monkeypatch.setattr(audit_trail, "EVENTS_MAX", 8)
    client = world.connect(b"a")
    auditor.work()
    auditor.code = ErrorCode.AUDIT_UNAVAILABLE
    for _ in range(20):
        client.send_json(Api.DELETE_TOPICS, {"topics": []})
        auditor.work()
    world.connect(b"b")
    auditor.code = ErrorCode.OK
    for _ in range(3):
        world.step(after_ms=1_100)
        auditor.work()
    assert auditor.names().count("login") == 2
    assert auditor.names().count("result") == 5
    assert sum(event.get("count", 0) for event in auditor.events) == 15
    assert not world.front._audit._waiting  # type: ignore[union-attr]


@pytest.mark.parametrize("field", [b'"by_id"', b'"by\\u005fid"'])
def test_the_decision_about_a_prepared_transaction_is_administration(
    world: FakeFront, auditor: Auditor, field: bytes
) -> None:
    world.has_groups = True
    client = world.connect(b"ops")
    auditor.work()
    client.send_json(Api.END_TRANSACTION, {"transactional_id": "x", "by_id": False})
    world.settle()
    message = world.groups.take()
    assert message is not None
    world.groups.answer(message, {})
    auditor.work()
    assert auditor.names() == ["login"]
    body = b'{"transactional_id": "x", "outcome": "commit", %s: true}' % field
    asked = client.send(Api.END_TRANSACTION, body)
    world.settle()
    assert world.groups.take() is None
    auditor.work()
    message = world.groups.take()
    assert message is not None
    world.groups.answer(message, {})
    auditor.work()
    assert asked in client.heard()
    assert auditor.names() == ["login", "request", "result"]


def test_secrets_of_a_request_are_left_out() -> None:
    planted = {"users": [{"name": "a", "password": "p", "keys": [{"Public_Key": "k"}]}],
               "set": {"some.token": "t", "groups.max": 3}}  # fmt: skip
    shown = str(without_secrets(planted))
    assert "'p'" not in shown
    assert "'t'" not in shown
    assert "'a'" in shown
    assert "3" in shown


def test_no_client_can_write_an_event(world: FakeFront, auditor: Auditor) -> None:
    client = world.connect(b"c")
    auditor.work()
    before = len(auditor.events)
    frames = encode_request(AUDIT_REQUEST, 1, 99, [b'{"events": [{"event": "forged"}]}'])
    world.transport.inbox.append([b"c", *(bytes(frame) for frame in frames)])
    auditor.work()
    assert client.heard()[99][0] is ErrorCode.UNKNOWN_API
    assert len(auditor.events) == before


def test_every_api_that_changes_something_for_all_is_administration() -> None:
    """An API that is added must be placed: administration, or work with records and groups."""
    work = {
        "HANDSHAKE", "PING", "PRODUCE", "FETCH", "METADATA", "INIT_PRODUCER_ID", "LIST_OFFSETS",
        "CREDIT", "LEASE_OFFSETS", "CHANGE_DELAYS", "GROUP_HEARTBEAT", "COMMIT_OFFSETS",
        "FETCH_OFFSETS", "SHARE_ACQUIRE", "SHARE_ACKNOWLEDGE", "INIT_TRANSACTIONS",
        "END_TRANSACTION", "CREATE_BRANCHES", "JOIN_TRANSACTION", "TEST_ACL",
    }  # fmt: skip
    for api in Api:
        is_look_up = api.name.startswith(("DESCRIBE_", "LIST_"))
        assert (api in ADMINISTRATION) != (api.name in work or is_look_up), api.name
