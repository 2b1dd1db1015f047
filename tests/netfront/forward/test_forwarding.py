"""Requests that a front passes on to the controller and the scheduler: bounded, answered once, and
answered when those are killed.
"""

from __future__ import annotations

import orjson
import pytest

from netfront.forward import forwarder as forwarders
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api
from tests.kit.stepped.fronts import FakeClient, FakeFront, broken, message_of


def test_an_answer_of_the_controller_that_cannot_be_passed_on_is_taken_once(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = client.send_json(Api.DESCRIBE_CLUSTER, {})
    world.step()
    message = world.controller.take()
    assert message is not None
    world.controller.answer(message, {"processes": []})
    with monkeypatch.context() as patch:
        patch.setattr("netfront.session.responses.Responses.send", broken)
        world.settle()
    assert client.heard()[asked][0] is ErrorCode.INTERNAL_ERROR
    assert world.controller.link.from_it.peek() is None


def test_requests_with_the_controller_are_bounded_for_a_connection_and_in_all(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        client.send_json(Api.DESCRIBE_CLUSTER, {})
        for _ in range(forwarders.SESSION_REQUESTS_MAX + 3)
    ]
    world.settle()
    heard = client.heard()
    assert [heard[number][0] for number in asked[-3:]] == [ErrorCode.TOO_MANY_REQUESTS] * 3
    assert len(heard) == 3
    other = world.connect(b"other")
    asked_by_other = other.send_json(Api.DESCRIBE_CLUSTER, {})
    world.settle()
    assert not other.heard(), "another connection has room of its own"
    while (message := world.controller.take()) is not None:
        world.controller.answer(message, {"fine": True})
    world.settle()
    assert {code for code, _ in client.heard().values()} == {ErrorCode.OK}
    assert asked_by_other in other.heard()
    assert not world.front._forwarding.controller._written
    monkeypatch.setattr(world.front._forwarding.controller.pending_requests, "_all_max", 0)
    assert client.ask(Api.DESCRIBE_CLUSTER, {})[0] is ErrorCode.TOO_MANY_REQUESTS


def test_bytes_that_wait_for_a_stopped_controller_are_bounded(
    world: FakeFront, client: FakeClient
) -> None:
    payload = orjson.dumps({"x": "y" * 100_000})
    asked = [client.send(Api.CREATE_TOPICS, payload) for _ in range(60)]
    world.settle()
    heard = client.heard()
    assert heard
    assert {code for code, _ in heard.values()} == {ErrorCode.TOO_MANY_REQUESTS}
    assert world.front._forwarding.controller._queued_bytes <= forwarders.SESSION_QUEUED_BYTES_MAX
    assert len(heard) < len(asked)


def test_a_connection_that_ends_leaves_no_request_behind(
    world: FakeFront, client: FakeClient
) -> None:
    for _ in range(20):
        client.send(Api.CREATE_TOPICS, orjson.dumps({"x": "y" * 100_000}))
    client.send_json(Api.LIST_DELAYS, {})
    client.fetch(world.add_topic("t", 3))
    world.settle()
    world.front._session_lifecycle.drop(world.front._sessions.all()[0])
    while world.controller.take() is not None:
        world.step()
    front = world.front
    assert not front._forwarding.controller._queue
    assert not front._forwarding.controller._queued_bytes_of
    assert not front._forwarding.controller._queued_bytes
    assert not len(front._forwarding.controller.pending_requests)
    assert not front._forwarding.scheduler._written
    assert not front._fetches._purgatory._own
    assert not front._fetches._purgatory._by_slot
    assert not len(front._fetch_wheel)
    assert not len(front._forwarding.controller.pending_requests.timeouts)


def test_a_correlation_id_that_is_under_way_is_not_taken_again(
    world: FakeFront, client: FakeClient
) -> None:
    client.send(Api.DESCRIBE_CLUSTER, b"{}", correlation_id=500)
    client.send(Api.DESCRIBE_CLUSTER, b"{}", correlation_id=500)
    world.settle()
    assert client.heard()[500][0] is ErrorCode.INVALID_REQUEST
    assert len(world.front._forwarding.controller.pending_requests) == 1


@pytest.mark.parametrize(
    ("api", "code", "says"),
    [
        (Api.INIT_PRODUCER_ID, ErrorCode.NOT_READY, "ask again"),
        (Api.DESCRIBE_CLUSTER, ErrorCode.NOT_READY, "ask again"),
        (Api.LEASE_OFFSETS, ErrorCode.NOT_READY, "ask again"),
        (Api.CREATE_TOPICS, ErrorCode.TIMED_OUT, "look at the list of topics"),
        (Api.DELETE_TOPICS, ErrorCode.TIMED_OUT, "look at the list of topics"),
        (Api.ALTER_TOPICS, ErrorCode.TIMED_OUT, "describe them"),
        (Api.DELETE_RECORDS, ErrorCode.TIMED_OUT, "look at the beginning offsets"),
        (Api.LIST_DELAYS, ErrorCode.NOT_READY, "ask again"),
        (Api.DESCRIBE_DELAYS, ErrorCode.NOT_READY, "ask again"),
        (Api.CHANGE_DELAYS, ErrorCode.TIMED_OUT, "list what is pending"),
    ],
)
def test_what_a_killed_decider_had_taken_is_answered_and_what_it_had_not_waits_for_its_successor(
    world: FakeFront, client: FakeClient, api: Api, code: ErrorCode, says: str
) -> None:
    forwarder = (
        world.scheduler
        if api in (Api.LIST_DELAYS, Api.DESCRIBE_DELAYS, Api.CHANGE_DELAYS)
        else world.controller
    )
    taken, left = client.send_json(api, {}), client.send_json(api, {})
    world.settle()
    assert forwarder.take() is not None
    forwarder.restart()
    world.step(after_ms=20)
    forwarder.begin()
    answer = client.heard()
    assert set(answer) == {taken}
    assert answer[taken][0] is code
    assert says in message_of(answer[taken])
    message = forwarder.take()
    assert message is not None
    forwarder.answer(message, {"by": "the successor"})
    world.settle()
    assert client.heard()[left][0] is ErrorCode.OK


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_front_that_sees_a_restart_late_waits_for_what_the_successor_has_taken(
    world: FakeFront, client: FakeClient, restarts: int
) -> None:
    """A front without a processor sees a new generation when that has worked for a while."""
    lost = [client.send_json(Api.CREATE_TOPICS, {}) for _ in range(restarts)]
    left, further = (client.send_json(Api.CREATE_TOPICS, {}) for _ in range(2))
    world.settle()
    for _ in range(restarts):
        assert world.controller.take() is not None
        world.controller.restart()
        world.controller.begin()
    messages = [world.controller.take() for _ in range(2)]
    world.step(after_ms=20)
    heard = client.heard()
    assert {number: answer[0] for number, answer in heard.items()} == dict.fromkeys(
        lost, ErrorCode.TIMED_OUT
    )
    for message in messages:
        assert message is not None
        world.controller.answer(message, {"by": "the successor"})
    world.settle()
    heard = client.heard()
    assert {number: answer[0] for number, answer in heard.items()} == dict.fromkeys(
        [left, further], ErrorCode.OK
    )


def test_a_front_with_a_request_at_the_controller_looks_often_whether_it_lives(
    world: FakeFront, client: FakeClient
) -> None:
    client.send_json(Api.CREATE_TOPICS, {})
    world.settle()
    deadline_ns = world.front.next_deadline_ns()
    assert deadline_ns is not None
    assert deadline_ns - world.now_ns <= forwarders.CHECK_INTERVAL_NS


def test_a_request_that_the_controller_never_answers_times_out_once(
    world: FakeFront, client: FakeClient
) -> None:
    asked = client.send_json(Api.CREATE_TOPICS, {})
    world.settle()
    message = world.controller.take()
    world.step(after_ms=40_000)
    assert client.heard()[asked][0] is ErrorCode.TIMED_OUT
    assert message is not None
    world.controller.answer(message, {})
    world.settle()
    assert not client.heard()
