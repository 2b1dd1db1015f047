"""Requests that a front passes on to the process of groups: started when it is first needed, told
of sessions that end, heard when it has news.
"""

from __future__ import annotations

from collections import deque

import orjson
import pytest

from netfront.forward import forwarder as forwarders
from netfront.forward.forwarder import CLOSED_MAX, PATIENCE_NS
from netfront.forward.forwarding_service import GATHERED_FROM, GROUPS_AT_ONCE_MAX
from netfront.socket.transport import Watched
from shm.messages.lane_messages import LaneKind
from shm.queues.lane import LaneMessage
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import (
    API_VERSIONS,
    PUSH_CORRELATION_ID,
    Api,
    decode_response_header,
    encode_request,
)
from tests.kit.stepped.fronts import FakeClient, FakeFront, message_of


def taken(world: FakeFront) -> LaneMessage:
    message = world.groups.take()
    assert message is not None
    return message


def start_groups(world: FakeFront) -> None:
    world.has_groups = True
    world.step(after_ms=20)


def last_headers(world: FakeFront, client: FakeClient) -> list[tuple[int, int, int]]:
    """(API, version, correlation id) of what was sent to the client since."""
    frames = world.transport.answers.get(client.identity, deque())
    headers = [decode_response_header(message[0]) for message in frames]
    frames.clear()
    return [(header.api, header.version, header.correlation_id) for header in headers]


def test_the_first_request_has_the_process_started_and_waits_for_it(
    world: FakeFront, client: FakeClient
) -> None:
    asked = client.send_json(Api.GROUP_HEARTBEAT, {"group": "g"})
    world.settle()
    assert world.wants_groups
    assert not client.heard()
    assert world.groups.take() is None
    deadline_ns = world.front.next_deadline_ns()
    assert deadline_ns is not None
    assert deadline_ns - world.now_ns <= forwarders.CHECK_INTERVAL_NS, (
        "it looks again whether the process is there"
    )
    start_groups(world)
    message = taken(world)
    assert (message.kind, message.slot, bytes(message.payload)) == (
        LaneKind.REQUEST,
        Api.GROUP_HEARTBEAT,
        b'{"group":"g"}',
    )
    world.groups.answer(message, {"member_epoch": 1})
    world.settle()
    assert client.heard()[asked][0] is ErrorCode.OK


def test_what_waits_for_a_process_that_never_comes_times_out(
    world: FakeFront, client: FakeClient
) -> None:
    asked = client.send_json(Api.COMMIT_OFFSETS, {})
    world.settle()
    world.step(after_ms=20_000)
    assert client.heard()[asked][0] is ErrorCode.TIMED_OUT
    start_groups(world)
    assert world.groups.take() is None, "it was answered: it is not done behind its client's back"


def test_without_shared_memory_for_the_process_its_requests_are_refused_with_a_sentence(
    world: FakeFront, client: FakeClient
) -> None:
    world.lacks_memory = True
    for api in (Api.GROUP_HEARTBEAT, Api.LIST_GROUPS):
        asked = client.send_json(api, {"group": "g"})
        world.settle()
        world.step(after_ms=20)
        answer = client.heard()[asked]
        assert answer[0] is ErrorCode.NOT_READY
        assert "/dev/shm" in message_of(answer)
    world.lacks_memory = False
    again = client.send_json(Api.GROUP_HEARTBEAT, {})
    world.settle()
    start_groups(world)
    world.groups.answer(taken(world), {})
    world.settle()
    assert client.heard()[again][0] is ErrorCode.OK


def test_to_list_groups_starts_no_process(world: FakeFront, client: FakeClient) -> None:
    assert client.ask(Api.LIST_GROUPS, {"after": ""}) == (
        ErrorCode.OK,
        {"groups": [], "next": None},
    )
    assert client.ask(Api.LIST_TRANSACTIONS, {}) == (
        ErrorCode.OK,
        {"transactions": [], "next": None},
    )
    assert not world.wants_groups
    world.has_groups = True
    asked = client.send_json(Api.LIST_GROUPS, {"after": ""})
    world.settle()
    assert taken(world).slot == Api.LIST_GROUPS
    assert asked not in client.heard()


def test_the_process_is_told_of_the_end_of_sessions_that_asked_it_something_and_of_no_others(
    world: FakeFront, client: FakeClient
) -> None:
    other = world.connect(b"other")
    other.send_json(Api.DESCRIBE_CLUSTER, {})
    client.send_json(Api.GROUP_HEARTBEAT, {})
    world.settle()
    start_groups(world)
    word = taken(world).session
    for session in world.front._sessions.all():
        world.front._session_lifecycle.drop(session)
    world.settle()
    closed = taken(world)
    assert (closed.kind, closed.session, len(closed.payload)) == (LaneKind.SESSION_CLOSED, word, 0)
    assert world.groups.take() is None
    assert not world.front._forwarding._group_sessions


def test_the_end_of_a_connection_is_told_in_the_step_that_finds_it_for_no_other_may_come(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.has_groups = True
    client.send_json(Api.GROUP_HEARTBEAT, {})
    world.settle()
    word = taken(world).session
    monkeypatch.setattr(world.transport, "try_send", lambda _identity, _frames: False)
    monkeypatch.setattr(world.transport, "watch", lambda _now_ns: Watched([client.identity], 0))
    world.transport.watch_at_ns = world.now_ns
    world.step()
    closed = taken(world)
    assert (closed.kind, closed.session) == (LaneKind.SESSION_CLOSED, word)


def test_a_handshake_anew_ends_the_session_before_for_groups_too(
    world: FakeFront, client: FakeClient
) -> None:
    world.has_groups = True
    client.send_json(Api.GROUP_HEARTBEAT, {})
    world.settle()
    first = taken(world).session
    anew = FakeClient(world, client.identity)
    anew.send_json(Api.GROUP_HEARTBEAT, {})
    world.settle()
    closed, second = taken(world), taken(world)
    assert (closed.kind, closed.session) == (LaneKind.SESSION_CLOSED, first)
    assert second.kind == LaneKind.REQUEST
    assert second.session != first


def test_ends_of_sessions_that_wait_for_a_stopped_process_are_bounded(world: FakeFront) -> None:
    groups = world.front._forwarding.groups
    for word in range(CLOSED_MAX + 100):
        groups.queue_session_closed(word)
    assert len(groups._queue) == CLOSED_MAX
    world.has_groups = True
    world.connect(b"one more").send_json(Api.GROUP_HEARTBEAT, {})
    world.settle()
    count = 0
    while (message := world.groups.take()) is not None:
        count += message.kind == LaneKind.SESSION_CLOSED
        world.step()
    assert count == CLOSED_MAX


def test_news_of_the_process_reach_the_session_that_they_are_for(
    world: FakeFront, client: FakeClient
) -> None:
    other = world.connect(b"other")
    world.has_groups = True
    client.send_json(Api.GROUP_HEARTBEAT, {})
    world.settle()
    word = taken(world).session
    world.groups.push(word, Api.GROUP_HEARTBEAT, {"group": "g", "member_id": "m"})
    world.groups.push(
        word + 1000, Api.GROUP_HEARTBEAT, {"group": "g", "member_id": "of a session that has ended"}
    )
    last_headers(world, client)
    last_headers(world, other)
    world.settle()
    [frames] = world.transport.answers[client.identity]
    header = decode_response_header(frames[0])
    assert (header.api, header.correlation_id, header.error) == (
        Api.GROUP_HEARTBEAT,
        PUSH_CORRELATION_ID,
        ErrorCode.OK,
    )
    assert orjson.loads(frames[1]) == {"group": "g", "member_id": "m"}
    assert header.generation == world.front._sessions.generation
    assert not world.transport.answers[other.identity]


@pytest.mark.parametrize(
    ("api", "code", "says"),
    [
        (Api.GROUP_HEARTBEAT, ErrorCode.NOT_READY, "ask again"),
        (Api.COMMIT_OFFSETS, ErrorCode.NOT_READY, "ask again"),
        (Api.FETCH_OFFSETS, ErrorCode.NOT_READY, "ask again"),
        (Api.LIST_GROUPS, ErrorCode.NOT_READY, "ask again"),
        (Api.DESCRIBE_GROUP, ErrorCode.NOT_READY, "ask again"),
        (Api.ALTER_GROUP_OFFSETS, ErrorCode.NOT_READY, "ask again"),
        (Api.DELETE_GROUPS, ErrorCode.TIMED_OUT, "look at the list of groups"),
        (Api.SHARE_ACQUIRE, ErrorCode.TIMED_OUT, "when its locks have timed out"),
        (Api.SHARE_ACKNOWLEDGE, ErrorCode.TIMED_OUT, "acknowledge them again"),
        (Api.INIT_TRANSACTIONS, ErrorCode.NOT_READY, "take the transactional id over again"),
        (Api.END_TRANSACTION, ErrorCode.TIMED_OUT, "repeat the request, which is safe"),
        (Api.LIST_TRANSACTIONS, ErrorCode.NOT_READY, "ask again"),
        (Api.DESCRIBE_TRANSACTION, ErrorCode.NOT_READY, "ask again"),
        (Api.ABORT_TRANSACTION, ErrorCode.TIMED_OUT, "look at the list of transactions"),
    ],
)
def test_what_a_killed_process_of_groups_had_taken_is_answered(
    world: FakeFront, client: FakeClient, api: Api, code: ErrorCode, says: str
) -> None:
    world.has_groups = True
    lost, left = client.send_json(api, {}), client.send_json(api, {})
    world.settle()
    taken(world)
    world.groups.restart()
    world.step(after_ms=20)
    answer = client.heard()
    assert set(answer) == {lost}
    assert answer[lost][0] is code
    assert says in message_of(answer[lost])
    world.groups.answer(taken(world), {"by": "the successor"})
    world.settle()
    assert client.heard()[left][0] is ErrorCode.OK


@pytest.mark.parametrize("way", ["answered", "late", "killed"])
def test_an_answer_has_the_version_that_was_asked(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setitem(API_VERSIONS, Api.GROUP_HEARTBEAT, (1, 3))
    world.has_groups = True
    last_headers(world, client)
    for version in (1, 2, 3):
        world.transport.inbox.append(
            [
                client.identity,
                *map(bytes, encode_request(Api.GROUP_HEARTBEAT, version, 100 + version, [b"{}"])),
            ]
        )
    world.settle()
    messages = [taken(world) for _ in range(3)]
    if way == "answered":
        for message in reversed(messages):
            world.groups.answer(message, {})
    elif way == "killed":
        world.groups.restart()
    world.step(after_ms=20_000 if way == "late" else 20)
    answers = [header for header in last_headers(world, client) if header[2] != PUSH_CORRELATION_ID]
    assert sorted(answers) == [
        (Api.GROUP_HEARTBEAT, version, 100 + version) for version in (1, 2, 3)
    ]


def test_a_fetch_is_answered_in_the_version_that_was_asked(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    [route] = world.add_topic("t", 1)
    monkeypatch.setitem(API_VERSIONS, Api.FETCH, (2, 3))
    last_headers(world, client)
    purgatory = client.fetch([route])
    world.settle()
    monkeypatch.setitem(API_VERSIONS, Api.FETCH, (2, 2))
    other = client.fetch([route])
    world.settle()
    world.append(route)
    world.settle()
    assert (
        sorted(header for header in last_headers(world, client) if header[2])
        == [(Api.FETCH, 3, purgatory), (Api.FETCH, 2, other)][::-1]
    )


def passed_on(world: FakeFront) -> list[int]:
    """The numbers in the requests that groups got since."""
    world.settle()
    found = []
    while (message := world.groups.take()) is not None:
        found.append(orjson.loads(message.payload)["n"])
    return found


def test_heartbeats_of_many_members_without_news_go_together_and_nothing_else_waits_for_them(
    world: FakeFront,
) -> None:
    start_groups(world)
    members = [FakeClient(world, b"member-%d" % number) for number in range(GATHERED_FROM)]
    quiet = {"group": "g", "member_epoch": 1, "topics": None, "owned": None}

    def ask(
        member: int,
        number: int,
        news: dict[str, object] | None = None,
        api: Api = Api.GROUP_HEARTBEAT,
    ) -> None:
        members[member].send_json(api, {**quiet, "n": number, **(news or {})})

    for member in range(GATHERED_FROM - 1):
        ask(member, member, {"member_epoch": 0, "topics": ["t"]})
    assert passed_on(world) == list(range(GATHERED_FROM - 1)), "who joins is not kept waiting"
    ask(0, 1)
    assert passed_on(world) == [1], "nor is a member among few"
    members[-1].send_json(Api.GROUP_HEARTBEAT, {"n": 0})
    world.settle()
    last = taken(world)

    ask(0, 2)
    ask(1, 3)
    assert passed_on(world) == []
    deadline_ns = world.front.next_deadline_ns()
    assert deadline_ns is not None
    assert deadline_ns - world.now_ns <= PATIENCE_NS
    world.step(after_ms=PATIENCE_NS // 1_000_000)
    assert passed_on(world) == [2, 3]

    ask(2, 4)
    assert passed_on(world) == []
    changes: list[dict[str, object]] = [
        {"owned": {}}, {"topics": ["u"]}, {"member_epoch": -1}, {"member_epoch": "1"},
        {"member_epoch": True},
    ]  # fmt: skip
    for number, news in enumerate(changes, 5):
        ask(3, number, news)
        assert number in passed_on(world)
        ask(4, 100 + number)
        assert passed_on(world) == []
    ask(5, 10, api=Api.COMMIT_OFFSETS)
    assert passed_on(world) == [109, 10], "in their order"

    world.groups.push(last.session, Api.GROUP_HEARTBEAT, {"group": "g"})
    world.settle()
    ask(-1, 11)
    assert passed_on(world) == [11], "who was told that there is news is not kept waiting"
    ask(-1, 12)
    assert passed_on(world) == []


def test_a_client_that_asks_for_much_at_once_waits_behind_itself_and_others_do_not(
    world: FakeFront, client: FakeClient
) -> None:
    start_groups(world)
    other = world.connect(b"other")
    asked = [client.send_json(Api.DESCRIBE_GROUP, {"n": n}) for n in range(3 * GROUPS_AT_ONCE_MAX)]
    world.settle()
    first = other.send_json(Api.GROUP_HEARTBEAT, {"group": "g"})
    world.settle()
    lane = []
    while (message := world.groups.take()) is not None:
        lane.append(message)
    assert [message.correlation_id for message in lane] == [*asked[:GROUPS_AT_ONCE_MAX], first]
    world.groups.answer(lane[0], {})
    world.settle()
    lane.append(taken(world))
    assert lane[-1].correlation_id == asked[GROUPS_AT_ONCE_MAX], (
        "an answer makes room for the next, in order"
    )
    assert world.groups.take() is None
    world.step(after_ms=20_000)  # what is with the process, and what waits for its turn, times out
    world.settle()
    heard = client.heard()
    assert {heard[number][0] for number in asked[1:]} == {ErrorCode.TIMED_OUT}
    forwarder = world.front._forwarding.groups
    assert (
        forwarder._queued_bytes,
        forwarder._queued_bytes_of,
        forwarder._fair_queue._waiting,
    ) == (0, {}, {})
    again = [client.send_json(Api.DESCRIBE_GROUP, {}) for _ in range(3 * GROUPS_AT_ONCE_MAX)]
    world.settle()
    assert [taken(world).correlation_id for _ in range(GROUPS_AT_ONCE_MAX)] == again[
        :GROUPS_AT_ONCE_MAX
    ]
    world.front._session_lifecycle.drop(
        next(
            session
            for session in world.front._sessions.all()
            if session.identity == client.identity
        )
    )
    world.settle()
    assert taken(world).kind == LaneKind.SESSION_CLOSED
    assert world.groups.take() is None
    assert (
        forwarder._queued_bytes,
        forwarder._fair_queue._waiting,
        forwarder._fair_queue._under_way.keys() & {lane[0].session},
    ) == (
        0,
        {},
        set(),
    )
