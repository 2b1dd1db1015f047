"""PRODUCE requests as they come in: what contradicts itself is refused as a whole, and every
version that a client may speak is served.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest

from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import (
    API_VERSIONS,
    PRODUCE_FRAMES_MAX,
    Api,
    decode_response_header,
    encode_request,
)
from tests.kit.stepped.fronts import FakeClient, FakeFront, message_of
from tests.kit.stepped.produce import batch, codes, number_of

LANE_BYTES = 1 << 16


@pytest.fixture
def world() -> FakeFront:
    return FakeFront(2, LANE_BYTES)


@pytest.fixture
def topic(world: FakeFront) -> list[Assignment]:
    """Even partitions are with worker 0, odd ones with worker 1."""
    return world.add_topic("t", 4)


def entry(topic: list[Assignment], length: int) -> bytes:
    return struct.pack("<16siIII", topic[0].topic_id, 0, 0, length, 0)


def head(count: int, *, acks: int = 1) -> bytes:
    return struct.pack("<iIII", acks, 500, count, 0)


@pytest.mark.parametrize(
    ("count", "lengths", "frames", "code", "says"),
    [
        (0, [], [200], ErrorCode.REQUEST_TOO_LARGE, "0 batches"),
        (4_097, [0] * 4_097, [0], ErrorCode.REQUEST_TOO_LARGE, "4097 batches"),
        (0xFFFFFFFF, [200], [200], ErrorCode.REQUEST_TOO_LARGE, "4294967295 batches"),
        (2, [200], [200], ErrorCode.MALFORMED_REQUEST, "80 bytes before them"),
        (1, [200, 200], [400], ErrorCode.MALFORMED_REQUEST, "48 bytes before them"),
        (1, [200], [], ErrorCode.MALFORMED_REQUEST, "0 frames with batches"),
        (9, [200] * 9, [200] * 9, ErrorCode.MALFORMED_REQUEST, "11 frames"),
        (2, [200, 200], [300, 100], ErrorCode.MALFORMED_REQUEST,
        "batch 1 has 200 bytes; frame 1 of the batches has 100 left"),
        (2, [200, 200], [100, 300], ErrorCode.MALFORMED_REQUEST,
        "batch 0 has 200 bytes; frame 1 of the batches has 100 left"),
        (2, [200, 200], [200, 199], ErrorCode.MALFORMED_REQUEST,
        "batch 1 has 200 bytes; frame 2 of the batches has 199 left"),
        (2, [200, 200], [200], ErrorCode.MALFORMED_REQUEST,
        "batch 1 has 200 bytes; frame 1 of the batches has 0 left"),
        (2, [200, 200], [401], ErrorCode.MALFORMED_REQUEST, "more bytes than their entries say"),
        (2, [200, 200], [200, 200, 200], ErrorCode.MALFORMED_REQUEST,
        "more bytes than their entries say"),
        (2, [200, 200], [200, 200, 0, 8], ErrorCode.MALFORMED_REQUEST,
        "more bytes than their entries say"),
        (1, [0xFFFFFFFF], [200], ErrorCode.MALFORMED_REQUEST, "batch 0 has 4294967295 bytes"),
        (2, [200, 0xFFFFFFFF], [199], ErrorCode.MALFORMED_REQUEST, "batch 0 has 200 bytes"),
    ],
)  # fmt: skip
def test_a_request_whose_numbers_contradict_each_other_is_refused_as_a_whole(
    world: FakeFront,
    client: FakeClient,
    topic: list[Assignment],
    count: int,
    lengths: list[int],
    frames: list[int],
    code: ErrorCode,
    says: str,
) -> None:
    first = head(count) + b"".join(entry(topic, length) for length in lengths)
    asked = client.send(Api.PRODUCE, first, *map(bytes, frames))
    good = client.produce([(topic[0], batch(7))])
    world.settle()
    heard = client.heard()
    assert heard[asked][0] is code
    assert says in message_of(heard[asked])
    ((message, data),) = world.workers[0].acquire_all()
    assert number_of(data) == 7
    world.workers[0].answer(message)
    world.settle()
    assert codes(client.heard()[good]) == [ErrorCode.OK]


def test_a_request_that_is_cut_anywhere_is_refused_as_a_whole(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    whole = head(2) + entry(topic, 200) * 2
    for length in range(len(whole)):
        asked = client.send(Api.PRODUCE, whole[:length], bytes(400))
        world.step()
        assert client.heard()[asked][0] is ErrorCode.MALFORMED_REQUEST
    for body in ((), (whole,)):
        asked = client.send(Api.PRODUCE, *body)
        world.step()
        assert client.heard()[asked][0] is ErrorCode.MALFORMED_REQUEST
    asked = client.send(Api.PRODUCE, head(1, acks=2) + entry(topic, 200), bytes(200))
    world.step()
    assert "acks is 2" in message_of(client.heard()[asked])
    assert not any(worker.acquire_all() for worker in world.workers)


def test_only_this_request_has_more_than_three_frames(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    single = produce_messages.encode_produce(
        produce_messages.ProduceRequest(topic[0].topic_id, 0, 1, 500)
    )
    eight = head(8) + entry(topic, 200) * 8
    for api, version, body, code in (
        (Api.PRODUCE, 2, [eight, *[bytes(200)] * PRODUCE_FRAMES_MAX], None),
        (Api.PRODUCE, 1, [single, bytes(200), b""], ErrorCode.MALFORMED_REQUEST),
        (Api.METADATA, 2, [b"{}", b"", b""], ErrorCode.MALFORMED_REQUEST),
    ):
        asked = client.send(api, *body, version=version)
        world.settle()
        heard = client.heard()
        assert (heard[asked][0] if asked in heard else None) is code
    assert world.workers[0].work() == 8


def test_a_correlation_id_that_is_under_way_is_refused(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    asked = client.produce([(topic[0], batch(1))])
    world.settle()
    frames = encode_request(Api.PRODUCE, 2, asked, [head(1) + entry(topic, 200), batch(2)])
    world.transport.inbox.append([client.identity, *map(bytes, frames)])
    world.settle()
    answer = client.heard()[asked]
    assert answer[0] is ErrorCode.INVALID_REQUEST
    assert "use a new one" in message_of(answer)
    assert world.workers[0].work() == 1
    world.settle()
    assert codes(client.heard()[asked]) == [ErrorCode.OK]


def test_version_1_is_answered_as_before_beside_version_2(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    def single(partition: int, number: int, timeout_ms: int = 500) -> int:
        request = produce_messages.ProduceRequest(topic[0].topic_id, partition, 1, timeout_ms)
        return client.send(
            Api.PRODUCE, produce_messages.encode_produce(request), batch(number), version=1
        )

    good, many, bad, late = (
        single(0, 0),
        client.produce([(topic[0], batch(1))]),
        single(9, 2),
        single(1, 3, timeout_ms=100),
    )
    world.settle()
    assert world.workers[0].work() == 2
    world.settle()
    world.step(101)
    headers = {
        (h := decode_response_header(frames[0])).correlation_id: h
        for frames in world.transport.answers[client.identity]
    }
    assert {number: headers[number].version for number in (good, many, bad, late)} == {
        good: 1,
        many: 4,
        bad: 1,
        late: 1,
    }
    heard = client.heard()
    assert produce_messages.decode_produced(heard[good][1][0]) == (0, 1_000, 3, 0)
    assert heard[bad][0] is ErrorCode.PARTITION_OUT_OF_RANGE
    assert heard[late][0] is ErrorCode.TIMED_OUT
    world.workers[1].work()
    world.settle()
    assert not client.heard()


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ([1, 1], 1),
        ([1, 2], 2),
        ([2, 2], 2),
        ([1, 7], 4),
        ([2, 9], 4),
        ([3, 9], 4),
        ([4, 9], 4),
        ([5, 9], None),
        ([0, 0], None),
    ],
)
def test_the_handshake_picks_the_highest_version_that_both_speak(
    world: FakeFront, offered: list[int], chosen: int | None
) -> None:
    versions: dict[str, Any] = {str(int(api)): list(span) for api, span in API_VERSIONS.items()}
    client = FakeClient(world, b"new", {**versions, str(int(Api.PRODUCE)): offered})
    assert client.versions.get(str(int(Api.PRODUCE))) == chosen
