"""The kernel's reading of PRODUCE requests against the decoders of the protocol: what it takes they
take, with the same result; what they refuse it leaves.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import kernel
from tailrace.kernel.reference_codec import PlainProduce
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import (
    FRAMES_MAX,
    Api,
    WireError,
    check_body,
    decode_request_header,
    encode_request,
    frames_max,
)

pytestmark = pytest.mark.skipif(
    kernel.compiled is None, reason="the reference leaves every request to the decoders"
)


def by_decoders(frames: list[bytes]) -> PlainProduce | None:
    """As the front reads it without the kernel; None: it is refused, or it is no PRODUCE request of
    version 2 or 3, or has a trace id.
    """
    message = frames[1:]
    try:
        header = decode_request_header(message[0] if message else b"")
        body = message[1:]
        if len(message) > FRAMES_MAX and len(message) > frames_max(header.api, header.version):
            return None
        check_body(header.body_length, body)
        if header.api != Api.PRODUCE or header.version not in (2, 3) or not body:
            return None
        acks, timeout_ms, entries, trace_id = produce_messages.decode_produce_batches(
            body[0], header.version
        )
        if trace_id:
            return None
        batches = produce_messages.cut_batches(entries, body[1:])
    except WireError:
        return None
    return (
        header.version,
        header.correlation_id,
        acks,
        timeout_ms,
        list(entries),
        batches,
        header.body_length - len(body[0]),
    )


def framed(api: Api, version: int, number: int, body: list[bytes]) -> list[bytes]:
    return [b"me", *map(bytes, encode_request(api, version, number, body))]


@st.composite
def messages(draw: st.DrawFn) -> list[bytes]:
    """Frames of sound requests."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    entries = [
        (
            draw(st.binary(min_size=16, max_size=16)),
            draw(st.integers(-1, 9)),
            draw(st.integers(0, 3)),
            n,
        )
        for n in lengths
    ]
    bodies: list[bytes] = []
    for length in lengths:
        batch = draw(st.binary(min_size=length, max_size=length))
        if bodies and draw(st.booleans()):
            bodies[-1] += batch
        else:
            bodies.append(batch)
    request = produce_messages.ProduceBatches(
        draw(st.sampled_from([0, 1, -1])), draw(st.integers(0, 2**32 - 1)), entries
    )
    head = produce_messages.encode_produce_batches(request)
    version = draw(st.sampled_from([2, 3]))
    return framed(Api.PRODUCE, version, draw(st.integers(0, 2**64 - 1)), [head, *bodies])


@given(frames=messages())
def test_what_is_sound_is_read_alike(frames: list[bytes]) -> None:
    read, expected = kernel.read_produce(frames), by_decoders(frames)
    assert read is not None
    assert expected is not None
    assert read == expected
    assert [type(batch) for batch in read[5]] == [type(batch) for batch in expected[5]]


@given(frames=messages(), lent=st.sets(st.integers(3, 9)))
def test_frames_of_batches_may_be_views(frames: list[bytes], lent: set[int]) -> None:
    views: list[Any] = [
        memoryview(frame) if number in lent else frame for number, frame in enumerate(frames)
    ]
    assert kernel.read_produce(views) == kernel.read_produce(frames) == by_decoders(views)


@given(frames=messages(), data=st.data())
def test_what_is_damaged_is_read_alike_or_left_to_the_decoders(
    frames: list[bytes], data: st.DataObject
) -> None:
    how = data.draw(st.sampled_from(["byte", "cut", "longer", "drop", "twice", "more"]))
    number = data.draw(st.integers(0, len(frames) - 1))
    frame = frames[number]
    if how == "byte" and frame:
        at = data.draw(st.integers(0, len(frame) - 1))
        frames[number] = frame[:at] + bytes([data.draw(st.integers(0, 255))]) + frame[at + 1 :]
    elif how == "cut":
        frames[number] = frame[: data.draw(st.integers(0, len(frame)))]
    elif how == "longer":
        frames[number] = frame + b"\0" * data.draw(st.integers(1, 40))
    elif how == "drop":
        del frames[number]
    elif how == "twice":
        frames.insert(number, frame)
    elif how == "more":
        frames += [b""] * data.draw(st.integers(1, 9))
    assert kernel.read_produce(frames) == by_decoders(frames)


def test_other_requests_and_what_is_no_request_are_left() -> None:
    head = produce_messages.encode_produce(produce_messages.ProduceRequest(bytes(16), 0, 1, 0))
    traced = produce_messages.encode_produce_batches(
        produce_messages.ProduceBatches(1, 0, [(bytes(16), 0, 0, 1)], b"t" * 16)
    )
    for frames in (
        [],
        [b"me"],
        [b"me", b""],
        framed(Api.PING, 1, 1, []),
        framed(Api.PRODUCE, 1, 1, [head, b"x"]),
        framed(Api.PRODUCE, 3, 1, [traced, b"x"]),
    ):
        assert kernel.read_produce(frames) is None


def test_frames_that_are_no_bytes_are_left() -> None:
    head = produce_messages.encode_produce_batches(
        produce_messages.ProduceBatches(1, 0, [(bytes(16), 0, 0, 1)])
    )
    frames = framed(Api.PRODUCE, 2, 1, [head, b"x"])
    assert kernel.read_produce(frames) is not None
    assert kernel.read_produce([*frames[:-1], bytearray(b"x")]) is None
