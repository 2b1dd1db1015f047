"""One client's requests at a front: what fails, is large or of a wrong type is answered, and costs
other clients nothing.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from netfront.session import time_slicing as time_slicer
from shm.memory.layout import ProcessWord
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.protocol.frame import Api, RequestHeader, decode_response_header
from tests.kit.stepped.fronts import FakeClient, FakeFront, broken, message_of

# ---- order ---------------------------------------------------------------------------------------


def test_a_topic_whose_creator_is_answered_is_known_to_requests_that_are_read_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its creator, at another front, passes it on while this front is within a step."""
    world = FakeFront(workers=1)
    client = world.connect(b"client")
    (assignment,) = FakeFront().add_topic("t", 1)
    receive = world.transport.try_receive

    def receive_behind_the_creation() -> list[bytes] | None:
        frames = receive()
        if frames is not None:
            world.controller.tell(assignment)
        return frames

    monkeypatch.setattr(world.transport, "try_receive", receive_behind_the_creation)
    (topic,) = client.ask(Api.METADATA, {"topics": ["t"]})[1]["topics"]
    assert topic["topic_id"] == assignment.topic_id.hex()


# ---- the boundary --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "target", "body"),
    [
        (Api.CREDIT, "tailrace.protocol.credit_messages.decode_credit", bytes(8)),
        (Api.METADATA, "tailrace.protocol.lookup_messages.decode_metadata", b"{}"),
        (Api.METADATA, "netfront.partition_routes.PartitionRoutes.describe", b'{"topics": ["t"]}'),
        (
            Api.LIST_OFFSETS,
            "tests.kit.stepped.fronts.FakeLog.state",
            b'{"partitions": [{"topic": "t", "partition": 0, "at": "latest"}]}',
        ),
        (Api.CREATE_TOPICS, "netfront.forward.forwarder.Forwarder.ask", b"{}"),
        (Api.FETCH, "netfront.fetch.purgatory.FetchPurgatory.note", None),
    ],
)
def test_what_a_handler_did_not_expect_is_answered_with_an_id_and_the_front_goes_on(
    world: FakeFront,
    client: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    api: Api,
    target: str,
    body: bytes | None,
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


def test_a_waiting_fetch_that_cannot_be_read_is_answered_and_does_not_hold_the_others(
    world: FakeFront, client: FakeClient
) -> None:
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


@pytest.mark.parametrize(
    ("api", "value"),
    [
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": True, "at": "latest"}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 1 << 40, "at": "latest"}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": True}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": 1.5}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": 2**64 - 1}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": {"behind": -1}}]}),
        (
            Api.LIST_OFFSETS,
            {"partitions": [{"topic": "t", "partition": 0, "at": {"behind": 2**64 - 1}}]},
        ),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": {}}]}),
        (Api.LIST_OFFSETS, {"partitions": [{"topic": "t", "partition": 0, "at": {"time_of": -1}}]}),
        (
            Api.LIST_OFFSETS,
            {"partitions": [{"topic": "t", "partition": 0, "at": {"time_of": None}}]},
        ),
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


@pytest.mark.parametrize(
    "value",
    [
        {"topics": 5},
        {"topics": [5]},
        {"topics": None, "names_only": 1},
        {"topics": None, "after": 5},
    ],
)
def test_metadata_of_wrong_types_is_refused(client: FakeClient, value: dict[str, object]) -> None:
    assert client.ask(Api.METADATA, value)[0] is ErrorCode.MALFORMED_REQUEST


# ---- large requests ------------------------------------------------------------------------------


def test_names_are_answered_once_and_too_many_are_refused_with_what_to_do(
    world: FakeFront, client: FakeClient
) -> None:
    world.add_topic("t", 1, bytes(100_000))
    code, answer = client.ask(Api.METADATA, {"topics": ["t"] * 4_000})
    assert code is ErrorCode.OK
    assert [topic["name"] for topic in answer["topics"]] == ["t"]
    for api, key, item in (
        (Api.METADATA, "topics", "t"),
        (Api.LIST_OFFSETS, "partitions", {"topic": "t", "partition": 0, "at": "latest"}),
    ):
        code, answer = client.ask(api, {key: [item] * 4_097})
        assert code is ErrorCode.REQUEST_TOO_LARGE
        assert "ask for fewer at once" in answer["message"]


def test_an_answer_that_would_be_too_large_is_refused_with_what_to_do(
    world: FakeFront, client: FakeClient
) -> None:
    for number in range(60):
        world.add_topic(f"t{number}", 1, bytes(100_000))
    for requested in (None, [f"t{number}" for number in range(60)]):
        code, answer = client.ask(Api.METADATA, {"topics": requested})
        assert code is ErrorCode.REQUEST_TOO_LARGE
        assert "ask for fewer at once, by name" in answer["message"]
    assert len(client.ask(Api.METADATA, {"topics": ["t1", "t2"]})[1]["topics"]) == 2


def test_names_of_all_topics_come_in_pages(world: FakeFront, client: FakeClient) -> None:
    for number in range(4_100):
        world.add_topic(f"t{number:05d}", 1)
    names: list[str] = []
    after: str | None = ""
    while after is not None:
        code, answer = client.ask(
            Api.METADATA, {"topics": None, "names_only": True, "after": after}
        )
        assert code is ErrorCode.OK
        names += [topic["name"] for topic in answer["topics"]]
        after = answer["after"]
    assert names == [f"t{number:05d}" for number in range(4_100)]


def test_a_json_of_very_many_values_is_refused_before_they_are_made(client: FakeClient) -> None:
    asked = client.send(Api.CREATE_TOPICS, b'{"topics": [' + b"[]," * 40_000 + b"0]}")
    client._world.settle()
    assert client.heard()[asked][0] is ErrorCode.REQUEST_TOO_LARGE


@pytest.mark.parametrize("kind", ["offsets", "times", "metadata", "fetch"])
def test_large_requests_are_done_in_slices_and_others_are_served_between(
    world: FakeFront, client: FakeClient, kind: str
) -> None:
    topic = world.add_topic("t", 4_096)
    for number in range(4_000):
        world.add_topic(f"t{number}", 1)
    other = world.connect(b"other")
    world.log.segments = 200
    entries = [
        {"topic": "t", "partition": p, "at": "latest" if kind == "offsets" else 0}
        for p in range(1_000 if kind == "offsets" else 20)
    ]
    looks_before = world.log.looks
    large = []
    for _ in range(8):
        if kind in ("offsets", "times"):
            large.append(client.send_json(Api.LIST_OFFSETS, {"partitions": entries}))
        elif kind == "metadata":
            large.append(
                client.send_json(
                    Api.METADATA, {"topics": [f"t{number}" for number in range(4_000)]}
                )
            )
        else:
            large.append(client.fetch(topic, max_wait_ms=0))
    ping = None
    heard: dict[int, object] = {}
    fair_queue = 0
    most_looks = 0
    while len(heard) < len(large):
        if ping is None:
            ping = other.send(Api.METADATA, b'{"topics": ["t1"]}')
        looks_before = world.log.looks
        world.step()
        most_looks = max(most_looks, world.log.looks - looks_before)
        fair_queue += 1
        if ping in other.heard():
            ping = None
        heard.update(client.heard())
        assert fair_queue < 1_000
    assert ping is None or fair_queue > 1
    assert fair_queue >= 8, "it was all done at once"
    assert most_looks <= 2 * time_slicer.UNITS_PER_STEP


def test_a_session_that_ends_takes_its_tasks_along(world: FakeFront, client: FakeClient) -> None:
    topic = world.add_topic("t", 1_000)
    for _ in range(5):
        client.fetch(topic, max_wait_ms=0)
    world.step()
    session = next(iter(world.front._sessions.all()))
    world.front._session_lifecycle.drop(session)
    assert not world.front._time_slicer
    world.settle()


def test_too_many_is_retriable() -> None:
    assert ERROR_TABLE[ErrorCode.TOO_MANY_REQUESTS].retriable
    assert int(ErrorCode.TOO_MANY_REQUESTS) == 39


def test_lookups_are_refused_to_a_client_that_reads_no_answers(
    world: FakeFront, client: FakeClient
) -> None:
    world.transport.unsent[client.identity] = 9 << 20
    assert client.ask(Api.METADATA, {"topics": []})[0] is ErrorCode.TOO_MANY_REQUESTS


# ---- what is not of this protocol ----------------------------------------------------------------


def raw_answer(world: FakeFront, identity: bytes, *frames: bytes) -> tuple[Any, str]:
    """(header, sentence) of the one answer to these frames."""
    world.transport.inbox.append([identity, *frames])
    world.settle()
    (answer,) = world.transport.answers.pop(identity)
    return decode_response_header(answer[0]), orjson.loads(answer[1])["message"]


@pytest.mark.parametrize(
    ("field", "at", "value"),
    [
        ("magic", 0, b"HTTP"),
        ("flags", 16, b"\1\0\0\0"),
        ("the header claims", 20, b"\7\0\0\0"),
        ("version", 6, b"\x63\0"),
    ],
)
def test_a_header_that_is_wrong_in_a_field_is_answered_by_what_the_others_say(
    world: FakeFront, client: FakeClient, field: str, at: int, value: bytes
) -> None:
    header = bytearray(RequestHeader(Api.METADATA, 1, 77, 0).to_bytes())
    header[at : at + len(value)] = value
    for identity in (client.identity, b"no session"):
        answered, sentence = raw_answer(world, identity, bytes(header))
        assert answered.error
        assert (answered.api, answered.version, answered.correlation_id) == (
            Api.METADATA,
            0x63 if field == "version" else 1,
            77,
        )
        assert field in sentence or identity != client.identity
    assert not world.transport.closed


def test_too_many_frames_are_answered_under_the_request_s_correlation_id(
    world: FakeFront, client: FakeClient
) -> None:
    answered, sentence = raw_answer(
        world, client.identity, RequestHeader(Api.PING, 1, 78, 3).to_bytes(), b"a", b"b", b"c"
    )
    assert (answered.error, answered.correlation_id) == (ErrorCode.MALFORMED_REQUEST, 78)
    assert "4 frames" in sentence


@pytest.mark.parametrize("frame", [b"", b"GET / HTTP/1.1", bytes(23), bytes(25)])
def test_a_frame_that_has_no_place_for_a_header_is_answered_and_its_connection_ends(
    world: FakeFront, frame: bytes
) -> None:
    answered, sentence = raw_answer(world, b"stranger", frame)
    assert (answered.error, answered.correlation_id) == (ErrorCode.MALFORMED_REQUEST, 0)
    assert "24 bytes" in sentence
    assert sentence in world.transport.closed[b"stranger"]


def test_a_response_has_the_version_of_its_request(world: FakeFront, client: FakeClient) -> None:
    (topic,) = world.add_topic("t", 1)
    world.append(topic)
    metadata = client.send_json(Api.METADATA, {"topics": ["t"]})
    asked = {
        metadata: 1, client.fetch([topic]): 4, client.fetch([topic], max_wait_ms=0): 4,
        client.fetch([topic, topic]): 4,
        client.send(Api.PING): 1, client.send(Api.FETCH, b"nonsense"): 4,
    }  # fmt: skip
    world.settle()
    heard = [
        decode_response_header(frames[0]) for frames in world.transport.answers[client.identity]
    ]
    assert {
        header.correlation_id: header.version for header in heard if header.correlation_id
    } == asked


def test_the_invariants_are_held_against_the_front_after_every_step(
    world: FakeFront, client: FakeClient
) -> None:
    """The kit checks the front behind every test here: it sees a session that leaves something
    behind, and bytes that are counted wrongly.
    """
    (topic,) = world.add_topic("t", 1)
    client.fetch([topic])
    client.send_json(Api.DESCRIBE_CLUSTER, {})
    world.settle()
    world.front._ledger.outstanding_bytes += 1
    with pytest.raises(AssertionError):
        world.step()
    world.front._ledger.outstanding_bytes -= 1
    world.step()
    world.front._sessions.close(world.front._sessions.all()[0])
    with pytest.raises(AssertionError, match="left something behind"):
        world.step()
