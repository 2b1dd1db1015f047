"""One client's requests at a front: what fails, is large or comes in numbers is answered, and costs the others nothing."""

from __future__ import annotations

import errno
from typing import Any

import orjson
import pytest

from netfront import deciders, fetch_progress, fetches, parked, slices
from shm.layout import ProcessWord
from tailrace.protocol import requests
from tailrace.protocol.errors import ERROR_TABLE, ErrorCode
from tailrace.protocol.wire import Api, RequestHeader, decode_response_header
from tests.kit.fronts import FakeClient, FakeFront


@pytest.fixture
def world() -> FakeFront:
    return FakeFront()


@pytest.fixture
def client(world: FakeFront) -> FakeClient:
    return world.connect(b"client")


def message_of(answer: tuple[ErrorCode, list[bytes]]) -> str:
    return str(orjson.loads(answer[1][0])["message"])


def broken(*_arguments: object) -> None:
    raise RuntimeError("nobody expected this")


# ---- the boundary --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "target", "body"),
    [
        (Api.CREDIT, "tailrace.protocol.requests.decode_credit", bytes(8)),
        (Api.METADATA, "tailrace.protocol.requests.decode_metadata", b"{}"),
        (Api.METADATA, "netfront.routing.Routing.describe", b'{"topics": ["t"]}'),
        (Api.LIST_OFFSETS, "tests.kit.fronts.FakeLog.state", b'{"partitions": [{"topic": "t", "partition": 0, "at": "latest"}]}'),
        (Api.CREATE_TOPICS, "netfront.deciders.Decider.ask", b"{}"),
        (Api.FETCH, "netfront.parked.Parked.note", None),
    ],
)
def test_what_a_handler_did_not_expect_is_answered_with_an_id_and_the_front_goes_on(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch, api: Api, target: str, body: bytes | None
) -> None:
    topic = world.add_topic("t", 1)
    with monkeypatch.context() as patch:
        patch.setattr(target, broken)
        asked = client.fetch(topic) if body is None else client.send(api, body)
        world.settle()
    code, answer = client.heard()[asked]
    assert code is ErrorCode.INTERNAL_ERROR
    assert "id=front-0." in message_of((code, answer))
    assert world.slot.load(ProcessWord.INTERNAL_ERRORS) == 1
    assert client.ask(Api.METADATA, {"topics": ["t"]})[1]["topics"][0]["name"] == "t"


def test_a_waiting_fetch_that_cannot_be_read_is_answered_and_does_not_hold_the_others(world: FakeFront, client: FakeClient) -> None:
    topic = world.add_topic("t", 2)
    first, second = client.fetch(topic[:1]), client.fetch(topic[1:])
    world.settle()
    world.log.failure = ZeroDivisionError()
    world.append(topic[0])
    world.log.failure = None
    world.append(topic[1])
    heard = client.heard()
    assert heard[first][0] is ErrorCode.INTERNAL_ERROR
    assert heard[second][0] is ErrorCode.OK


def test_an_answer_of_the_coordinator_that_cannot_be_passed_on_is_taken_once(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = client.send_json(Api.DESCRIBE_CLUSTER, {})
    world.step()
    message = world.coordinator.take()
    assert message is not None
    world.coordinator.answer(message, {"processes": []})
    with monkeypatch.context() as patch:
        patch.setattr("netfront.replies.Replies.send", broken)
        world.settle()
    assert client.heard()[asked][0] is ErrorCode.INTERNAL_ERROR
    assert world.coordinator.link.from_it.peek() is None


@pytest.mark.parametrize(
    ("api", "value"),
    [
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": True, "at": "latest"}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 1 << 40, "at": "latest"}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": True}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": 1.5}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": 2**64 - 1}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": {"behind": -1}}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": {"behind": 2**64 - 1}}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": {}}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": ["t"], "partition": {}, "at": []}]}),
    ],
)
def test_an_entry_of_a_wrong_type_or_range_is_refused_and_the_next_one_served(
    world: FakeFront, client: FakeClient, api: Api, value: dict[str, list[object]]
) -> None:
    world.add_topic("t", 1)
    value = {"partitions": [*value["partitions"], {"topic": "t", "partition": 0, "at": "latest"}]}
    code, answer = client.ask(api, value)
    assert code is ErrorCode.OK
    assert [item["code"] for item in answer["offsets"]] == [ErrorCode.INVALID_REQUEST, ErrorCode.OK]


@pytest.mark.parametrize("value", [{"topics": 5}, {"topics": [5]}, {"topics": None, "names_only": 1}, {"topics": None, "after": 5}])
def test_metadata_of_wrong_types_is_refused(client: FakeClient, value: dict[str, object]) -> None:
    assert client.ask(Api.METADATA, value)[0] is ErrorCode.MALFORMED_REQUEST


# ---- large requests --------------------------------------------------------------------------------------------------------------------


def test_names_are_answered_once_and_too_many_are_refused_with_what_to_do(world: FakeFront, client: FakeClient) -> None:
    world.add_topic("t", 1, bytes(100_000))
    code, answer = client.ask(Api.METADATA, {"topics": ["t"] * 4_000})
    assert code is ErrorCode.OK
    assert [topic["name"] for topic in answer["topics"]] == ["t"]
    for api, key, item in ((Api.METADATA, "topics", "t"), (Api.LIST_OFFSETS, "partitions", {"topic": "t", "partition": 0, "at": "latest"})):
        code, answer = client.ask(api, {key: [item] * 4_097})
        assert code is ErrorCode.REQUEST_TOO_LARGE
        assert "ask for fewer at once" in answer["message"]


def test_an_answer_that_would_be_too_large_is_refused_with_what_to_do(world: FakeFront, client: FakeClient) -> None:
    for number in range(60):
        world.add_topic(f"t{number}", 1, bytes(100_000))
    for wanted in (None, [f"t{number}" for number in range(60)]):
        code, answer = client.ask(Api.METADATA, {"topics": wanted})
        assert code is ErrorCode.REQUEST_TOO_LARGE
        assert "ask for fewer at once, by name" in answer["message"]
    assert len(client.ask(Api.METADATA, {"topics": ["t1", "t2"]})[1]["topics"]) == 2


def test_names_of_all_topics_come_in_pages(world: FakeFront, client: FakeClient) -> None:
    for number in range(4_100):
        world.add_topic(f"t{number:05d}", 1)
    names: list[str] = []
    after: str | None = ""
    while after is not None:
        code, answer = client.ask(Api.METADATA, {"topics": None, "names_only": True, "after": after})
        assert code is ErrorCode.OK
        names += [topic["name"] for topic in answer["topics"]]
        after = answer["after"]
    assert names == [f"t{number:05d}" for number in range(4_100)]


def test_a_json_of_very_many_values_is_refused_before_they_are_made(client: FakeClient) -> None:
    asked = client.send(Api.CREATE_TOPICS, b'{"topics": [' + b"[]," * 40_000 + b"0]}")
    client._world.settle()
    assert client.heard()[asked][0] is ErrorCode.REQUEST_TOO_LARGE


@pytest.mark.parametrize("kind", ["offsets", "times", "metadata", "fetch"])
def test_large_requests_are_done_in_slices_and_others_are_served_between(world: FakeFront, client: FakeClient, kind: str) -> None:
    topic = world.add_topic("t", 4_096)
    for number in range(4_000):
        world.add_topic(f"t{number}", 1)
    other = world.connect(b"other")
    world.log.segments = 200
    entries = [
        {"topic": "t", "partition": p, "at": "latest" if kind == "offsets" else 0} for p in range(1_000 if kind == "offsets" else 20)
    ]
    looks_before = world.log.looks
    large = []
    for _ in range(8):
        if kind in ("offsets", "times"):
            large.append(client.send_json(Api.LIST_OFFSETS, {"partitions": entries}))
        elif kind == "metadata":
            large.append(client.send_json(Api.METADATA, {"topics": [f"t{number}" for number in range(4_000)]}))
        else:
            large.append(client.fetch(topic, max_wait_ms=0))
    ping = None
    heard: dict[int, object] = {}
    turns = 0
    most_looks = 0
    while len(heard) < len(large):
        if ping is None:
            ping = other.send(Api.METADATA, b'{"topics": ["t1"]}')
        looks_before = world.log.looks
        world.step()
        most_looks = max(most_looks, world.log.looks - looks_before)
        turns += 1
        if ping in other.heard():
            ping = None
        heard.update(client.heard())
        assert turns < 1_000
    assert ping is None or turns > 1
    assert turns >= 8, "it was all done at once"
    assert most_looks <= 2 * slices.UNITS_PER_STEP


def test_a_session_that_ends_takes_its_tasks_along(world: FakeFront, client: FakeClient) -> None:
    topic = world.add_topic("t", 1_000)
    for _ in range(5):
        client.fetch(topic, max_wait_ms=0)
    world.step()
    session = next(iter(world.front._sessions.all()))
    world.front._keeper.drop(session)
    assert not world.front._slices
    world.settle()


# ---- what is not of this protocol ------------------------------------------------------------------------------------------------------


def raw_answer(world: FakeFront, identity: bytes, *frames: bytes) -> tuple[Any, str]:
    """(header, sentence) of the one answer to these frames."""
    world.transport.inbox.append([identity, *frames])
    world.settle()
    (answer,) = world.transport.answers.pop(identity)
    return decode_response_header(answer[0]), orjson.loads(answer[1])["message"]


@pytest.mark.parametrize(
    ("field", "at", "value"),
    [("magic", 0, b"HTTP"), ("flags", 16, b"\1\0\0\0"), ("the header claims", 20, b"\7\0\0\0"), ("version", 6, b"\x63\0")],
)
def test_a_header_that_is_wrong_in_a_field_is_answered_by_what_the_others_say(
    world: FakeFront, client: FakeClient, field: str, at: int, value: bytes
) -> None:
    header = bytearray(RequestHeader(Api.METADATA, 1, 77, 0).to_bytes())
    header[at : at + len(value)] = value
    for identity in (client.identity, b"no session"):
        answered, sentence = raw_answer(world, identity, bytes(header))
        assert answered.error
        assert (answered.api, answered.version, answered.correlation_id) == (Api.METADATA, 0x63 if field == "version" else 1, 77)
        assert field in sentence or identity != client.identity
    assert not world.transport.closed


def test_too_many_frames_are_answered_under_the_request_s_correlation_id(world: FakeFront, client: FakeClient) -> None:
    answered, sentence = raw_answer(world, client.identity, RequestHeader(Api.PING, 1, 78, 3).to_bytes(), b"a", b"b", b"c")
    assert (answered.error, answered.correlation_id) == (ErrorCode.MALFORMED_REQUEST, 78)
    assert "4 frames" in sentence


@pytest.mark.parametrize("frame", [b"", b"GET / HTTP/1.1", bytes(23), bytes(25)])
def test_a_frame_that_has_no_place_for_a_header_is_answered_and_its_connection_ends(world: FakeFront, frame: bytes) -> None:
    answered, sentence = raw_answer(world, b"stranger", frame)
    assert (answered.error, answered.correlation_id) == (ErrorCode.MALFORMED_REQUEST, 0)
    assert "24 bytes" in sentence
    assert sentence in world.transport.closed[b"stranger"]


def test_a_response_has_the_version_of_its_request(world: FakeFront, client: FakeClient) -> None:
    (topic,) = world.add_topic("t", 1)
    world.append(topic)
    metadata = client.send_json(Api.METADATA, {"topics": ["t"]})
    asked = {
        metadata: 1, client.fetch([topic]): 2, client.fetch([topic], max_wait_ms=0): 2, client.fetch([topic, topic]): 2,
        client.send(Api.PING): 1, client.send(Api.FETCH, b"nonsense"): 2,
    }  # fmt: skip
    world.settle()
    heard = [decode_response_header(frames[0]) for frames in world.transport.answers[client.identity]]
    assert {header.correlation_id: header.version for header in heard if header.correlation_id} == asked


def test_the_invariants_are_held_against_the_front_after_every_step(world: FakeFront, client: FakeClient) -> None:
    """What the kit checks behind every test here: it sees a session that leaves something behind, and bytes that are counted wrongly."""
    (topic,) = world.add_topic("t", 1)
    client.fetch([topic])
    client.send_json(Api.DESCRIBE_CLUSTER, {})
    world.settle()
    world.front._ledger.held_bytes += 1
    with pytest.raises(AssertionError):
        world.step()
    world.front._ledger.held_bytes -= 1
    world.step()
    world.front._sessions.close(world.front._sessions.all()[0])
    with pytest.raises(AssertionError, match="left something behind"):
        world.step()


# ---- requests in numbers ---------------------------------------------------------------------------------------------------------------


def test_too_many_is_retriable() -> None:
    assert ERROR_TABLE[ErrorCode.TOO_MANY_REQUESTS].retriable
    assert int(ErrorCode.TOO_MANY_REQUESTS) == 39


def test_requests_with_the_coordinator_are_bounded_for_a_connection_and_in_all(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [client.send_json(Api.DESCRIBE_CLUSTER, {}) for _ in range(deciders.SESSION_REQUESTS_MAX + 3)]
    world.settle()
    heard = client.heard()
    assert [heard[number][0] for number in asked[-3:]] == [ErrorCode.TOO_MANY_REQUESTS] * 3
    assert len(heard) == 3
    other = world.connect(b"other")
    asked_by_other = other.send_json(Api.DESCRIBE_CLUSTER, {})
    world.settle()
    assert not other.heard(), "another connection has room of its own"
    while (message := world.coordinator.take()) is not None:
        world.coordinator.answer(message, {"fine": True})
    world.settle()
    assert {code for code, _ in client.heard().values()} == {ErrorCode.OK}
    assert asked_by_other in other.heard()
    assert not world.front._decisions.coordinator._written
    monkeypatch.setattr(world.front._decisions.coordinator.unanswered, "_all_max", 0)
    assert client.ask(Api.DESCRIBE_CLUSTER, {})[0] is ErrorCode.TOO_MANY_REQUESTS


def test_bytes_that_wait_for_a_stopped_coordinator_are_bounded(world: FakeFront, client: FakeClient) -> None:
    payload = orjson.dumps({"x": "y" * 100_000})
    asked = [client.send(Api.CREATE_TOPICS, payload) for _ in range(60)]
    world.settle()
    heard = client.heard()
    assert heard
    assert {code for code, _ in heard.values()} == {ErrorCode.TOO_MANY_REQUESTS}
    assert world.front._decisions.coordinator._queued_bytes <= deciders.SESSION_QUEUED_BYTES_MAX
    assert len(heard) < len(asked)


def test_a_connection_that_ends_leaves_no_request_behind(world: FakeFront, client: FakeClient) -> None:
    for _ in range(20):
        client.send(Api.CREATE_TOPICS, orjson.dumps({"x": "y" * 100_000}))
    client.send_json(Api.LIST_DELAYS, {})
    client.fetch(world.add_topic("t", 3))
    world.settle()
    world.front._keeper.drop(world.front._sessions.all()[0])
    while world.coordinator.take() is not None:
        world.step()
    front = world.front
    assert not front._decisions.coordinator._outbox.waiting
    assert not front._decisions.coordinator._queued_bytes_of
    assert not front._decisions.coordinator._queued_bytes
    assert not len(front._decisions.coordinator.unanswered)
    assert not front._decisions.scheduler._written
    assert not front._fetches._parked._own
    assert not front._fetches._parked._by_slot
    assert not len(front._fetch_wheel)
    assert not len(front._decisions.coordinator.unanswered.timeouts)


def test_a_correlation_id_that_is_under_way_is_not_taken_again(world: FakeFront, client: FakeClient) -> None:
    client.send(Api.DESCRIBE_CLUSTER, b"{}", correlation_id=500)
    client.send(Api.DESCRIBE_CLUSTER, b"{}", correlation_id=500)
    world.settle()
    assert client.heard()[500][0] is ErrorCode.INVALID_REQUEST
    assert len(world.front._decisions.coordinator.unanswered) == 1


def test_waiting_fetches_are_bounded_for_a_connection_and_in_all(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = world.add_topic("t", 4_096)
    wide = [client.fetch(topic) for _ in range(5)]
    world.settle()
    heard = client.heard()
    assert list(heard) == wide[4:]
    assert heard[wide[4]][0] is ErrorCode.TOO_MANY_REQUESTS
    other = world.connect(b"other")
    for _ in range(parked.SESSION_FETCHES_MAX + 1):
        last = other.fetch(topic[:1])
    world.settle()
    assert list(other.heard()) == [last]
    monkeypatch.setattr(parked, "ENTRIES_MAX", world.front._fetches._parked.entry_count)
    third = world.connect(b"third")
    asked = third.fetch(topic[:1])
    world.settle()
    assert third.heard()[asked][0] is ErrorCode.TOO_MANY_REQUESTS
    assert len(world.front._fetch_wheel) == world.front._fetches._parked.fetch_count == 4 + parked.SESSION_FETCHES_MAX


# ---- fetches ---------------------------------------------------------------------------------------------------------------------------


def test_a_batch_that_settles_costs_a_wide_waiting_fetch_of_other_partitions_nothing(world: FakeFront, client: FakeClient) -> None:
    topic = world.add_topic("t", 4_097)
    asked = [client.fetch(topic[1:], max_wait_ms=60_000) for _ in range(3)]
    world.settle()
    looks = world.log.looks
    world.append(topic[0])
    assert world.log.looks == looks, "it waits for other partitions"
    world.append(topic[9])
    assert world.log.looks - looks <= 3, "only the partition that moved is looked at"
    world.settle()
    answers = client.heard()
    assert set(answers) == set(asked)
    entries = requests.decode_fetched(answers[asked[0]][1])
    assert [bytes(data) for _, data in entries if len(data)] == [b"x"]
    assert len(entries) == 4_096


def test_thousands_that_wait_for_one_batch_are_answered_in_slices(world: FakeFront) -> None:
    topic = world.add_topic("t", 1)
    clients = [world.connect(b"c%d" % number) for number in range(3)]
    for client in clients:
        for _ in range(parked.SESSION_FETCHES_MAX):
            client.fetch(topic)
    world.settle()
    world.append(topic[0])
    first = sum(len(client.heard()) for client in clients)
    assert 0 < first <= fetches.LOOKS_PER_STEP
    world.append(topic[0], b"yy")
    world.settle()
    assert first + sum(len(client.heard()) for client in clients) == 3 * parked.SESSION_FETCHES_MAX
    assert not world.front._fetches._moved


def test_fetches_of_a_dropped_partition_are_answered_and_forgotten(world: FakeFront, client: FakeClient) -> None:
    topic = world.add_topic("t", 2)
    world.append(topic[1])
    served = client.fetch(topic[1:])
    waiting = [client.fetch(topic[:1], max_wait_ms=60_000) for _ in range(50)]
    wide = client.fetch([*topic[:1], *world.add_topic("u", 100)], max_wait_ms=60_000)
    world.settle()
    assert set(client.heard()) == {served}
    service = world.front._fetches
    assert service._entries._place_count == 1
    for assignment in topic:
        dropped = {field: getattr(assignment, field) for field in assignment.__dataclass_fields__}
        world.coordinator.tell(type(assignment)(**{**dropped, "dropped": True, "version": 99}))
    world.settle()
    heard = client.heard()
    assert set(heard) == {*waiting, wide}
    assert requests.decode_fetched(heard[waiting[0]][1])[0][0].error == ErrorCode.UNKNOWN_TOPIC
    assert {entry.error for entry, _ in requests.decode_fetched(heard[wide][1])} == {ErrorCode.UNKNOWN_TOPIC, ErrorCode.OK}
    assert not service._parked._by_slot
    assert not service._parked.fetch_count
    assert not len(world.front._fetch_wheel)
    assert not service._entries._places
    assert service._entries._place_count == 0


def test_a_fetch_waits_until_its_client_has_read_what_it_was_sent(world: FakeFront, client: FakeClient) -> None:
    topic = world.add_topic("t", 1)
    world.append(topic[0])
    world.transport.unsent[client.identity] = fetch_progress.SESSION_UNSENT_MAX_BYTES
    for _ in range(10):
        client.fetch(topic, max_wait_ms=0)
    world.step()
    for _ in range(200):
        world.step(after_ms=5)
    assert not client.heard(), "neither its data nor empty answers pile up"
    world.transport.unsent[client.identity] = 0
    world.step(after_ms=5)
    world.settle()
    assert len(client.heard()) == 10
    assert world.front._fetches.next_deadline_ns() > world.now_ns or not world.front._fetches._held


def test_when_all_clients_have_much_unread_who_has_nothing_gets_little_and_nobody_much(world: FakeFront, client: FakeClient) -> None:
    topic = world.add_topic("t", 1)
    for _ in range(10):
        world.append(topic[0], bytes(200_000))
    world.transport.others_unsent = fetch_progress.UNSENT_MAX_BYTES
    asked = client.fetch(topic, max_bytes=4 << 20)
    world.settle()
    ((entry, data),) = requests.decode_fetched(client.heard()[asked][1])
    assert entry.error == 0
    assert 200_000 <= len(data) <= fetch_progress.SCARCE_BYTES
    world.transport.others_unsent = fetch_progress.UNSENT_HARD_MAX_BYTES
    asked = client.fetch(topic, max_bytes=4 << 20)
    for _ in range(10):
        world.step(after_ms=5)
    assert not client.heard()
    world.transport.others_unsent = 0
    world.step(after_ms=5)
    assert len(requests.decode_fetched(client.heard()[asked][1])[0][1]) == 2_000_000


def test_lookups_are_refused_to_a_client_that_reads_no_answers(world: FakeFront, client: FakeClient) -> None:
    world.transport.unsent[client.identity] = 9 << 20
    assert client.ask(Api.METADATA, {"topics": []})[0] is ErrorCode.TOO_MANY_REQUESTS


def test_a_fetch_that_wants_more_bytes_counts_what_comes_and_reads_it_twice_at_most(world: FakeFront, client: FakeClient) -> None:
    topic = world.add_topic("t", 1)
    world.append(topic[0], bytes(10))
    asked = client.fetch(topic, min_bytes=1_000, max_wait_ms=60_000)
    world.settle()
    for _ in range(98):
        world.append(topic[0], bytes(10))
    assert not client.heard()
    world.append(topic[0], bytes(10))
    ((_, data),) = requests.decode_fetched(client.heard()[asked][1])
    assert len(data) == 1_000


def test_a_fetch_that_wants_more_bytes_is_answered_with_what_there_is_when_its_time_is_up(world: FakeFront, client: FakeClient) -> None:
    topic = world.add_topic("t", 1)
    world.append(topic[0], bytes(10))
    asked = client.fetch(topic, min_bytes=1_000, max_wait_ms=100)
    world.settle()
    world.append(topic[0], bytes(10))
    assert not client.heard()
    world.step(after_ms=101)
    assert len(requests.decode_fetched(client.heard()[asked][1])[0][1]) == 20


def test_a_fetch_that_names_a_partition_twice_is_refused(world: FakeFront, client: FakeClient) -> None:
    topic = world.add_topic("t", 1)
    asked = client.fetch([*topic, *topic])
    world.settle()
    assert client.heard()[asked][0] is ErrorCode.INVALID_REQUEST


def test_cold_reads_hold_a_bounded_number_of_descriptors_and_the_others_wait_their_turn(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "READS_MAX", 4)
    topic = world.add_topic("t", 1)
    world.append(topic[0])
    world.log.is_cold = True
    asked = [client.fetch(topic) for _ in range(10)]
    world.settle()
    assert len(world.pool.submitted) == 4
    world.log.is_cold = False
    world.pool.done, world.pool.submitted = world.pool.submitted, []
    world.step()
    world.step(after_ms=5)
    world.settle()
    assert set(client.heard()) == set(asked)
    assert world.front._fetches._reading == 0


def test_a_fetch_that_meets_too_few_descriptors_is_told_to_ask_again(world: FakeFront, client: FakeClient) -> None:
    topic = world.add_topic("t", 1)
    world.append(topic[0])
    world.log.failure = OSError(errno.EMFILE, "too many open files")
    asked = client.fetch(topic)
    world.settle()
    assert requests.decode_fetched(client.heard()[asked][1])[0][0].error == ErrorCode.NOT_READY


# ---- a killed coordinator or scheduler -------------------------------------------------------------------------------------------------


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
    decider = world.scheduler if api in (Api.LIST_DELAYS, Api.DESCRIBE_DELAYS, Api.CHANGE_DELAYS) else world.coordinator
    taken, left = client.send_json(api, {}), client.send_json(api, {})
    world.settle()
    assert decider.take() is not None
    decider.restart()
    world.step(after_ms=20)
    answer = client.heard()
    assert set(answer) == {taken}
    assert answer[taken][0] is code
    assert says in message_of(answer[taken])
    message = decider.take()
    assert message is not None
    decider.answer(message, {"by": "the successor"})
    world.settle()
    assert client.heard()[left][0] is ErrorCode.OK


def test_a_front_with_a_request_at_the_coordinator_looks_often_whether_it_lives(world: FakeFront, client: FakeClient) -> None:
    client.send_json(Api.CREATE_TOPICS, {})
    world.settle()
    deadline_ns = world.front.next_deadline_ns()
    assert deadline_ns is not None
    assert deadline_ns - world.now_ns <= deciders.LOOK_INTERVAL_NS


def test_a_request_that_the_coordinator_never_answers_times_out_once(world: FakeFront, client: FakeClient) -> None:
    asked = client.send_json(Api.CREATE_TOPICS, {})
    world.settle()
    message = world.coordinator.take()
    world.step(after_ms=40_000)
    assert client.heard()[asked][0] is ErrorCode.TIMED_OUT
    assert message is not None
    world.coordinator.answer(message, {})
    world.settle()
    assert not client.heard()
