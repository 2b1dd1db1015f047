"""The codec, sans-IO: both directions, whole, cut at every byte, bit-flipped, and random bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.error_codes import ERROR_TABLE, ErrorCode, code_of
from tailrace.protocol import credit_messages, fetch_messages, produce_messages
from tailrace.protocol import json_messages as rq
from tailrace.protocol.frame import (
    JSON_MAX_BYTES,
    Api,
    RequestHeader,
    ResponseHeader,
    WireError,
    check_body,
    decode_request_header,
    decode_response_header,
    encode_request,
    encode_response,
)
from tailrace.protocol.session import ClientSession, State

TOPIC = bytes(range(16))
FETCH = fetch_messages.FetchRequest(
    500,
    1,
    1 << 20,
    77,
    [
        fetch_messages.FetchEntry(TOPIC, 0, -1, 12, 4096),
        fetch_messages.FetchEntry(TOPIC, 3, 2, 2**40, 1 << 20, 1),
    ],
)
BATCHES = produce_messages.ProduceBatches(-1, 30000, [(TOPIC, 0, 0, 100), (TOPIC, 5, 3, 2**31)])
PRODUCED = [
    produce_messages.ProducedEntry(0, 1, 4, 2**40, 77),
    produce_messages.ProducedEntry(12, 0, -1, -1, -1),
]
ENTRIES = [
    fetch_messages.FetchedEntry(TOPIC, 0, 0, 1, 5, 100, 0, -1),
    fetch_messages.FetchedEntry(TOPIC, 1, 12, 1, 0, 50, 10, 70),
    fetch_messages.FetchedEntry(TOPIC, 2, 0, 1, 3, 9, 0, 40, 30, 1),
]
CODECS: list[tuple[bytes, Callable[[bytes], Any], Any]] = [
    (
        RequestHeader(3, 1, 99, 1234).to_bytes(),
        decode_request_header,
        RequestHeader(3, 1, 99, 1234),
    ),
    (
        ResponseHeader(4, 1, 98, 12, 7, 2**40, 55).to_bytes(),
        decode_response_header,
        ResponseHeader(4, 1, 98, 12, 7, 2**40, 55),
    ),
    (
        produce_messages.encode_produce(produce_messages.ProduceRequest(TOPIC, 5, -1, 30000)),
        produce_messages.decode_produce,
        produce_messages.ProduceRequest(TOPIC, 5, -1, 30000),
    ),
    (
        produce_messages.encode_produced(produce_messages.ProduceResponse(10, 20, 3, 1)),
        produce_messages.decode_produced,
        produce_messages.ProduceResponse(10, 20, 3, 1),
    ),
    (
        produce_messages.encode_produce_batches(BATCHES),
        produce_messages.decode_produce_batches,
        BATCHES,
    ),
    (
        produce_messages.encode_produced_batches(PRODUCED),
        produce_messages.decode_produced_batches,
        PRODUCED,
    ),
    (fetch_messages.encode_fetch(FETCH), fetch_messages.decode_fetch, FETCH),
    (credit_messages.encode_credit(123), credit_messages.decode_credit, 123),
    (rq.encode_json({"a": [1]}), rq.decode_json, {"a": [1]}),
]
IDS = [
    "request header",
    "response header",
    "produce",
    "produced",
    "produce 2",
    "produced 2",
    "fetch",
    "credit",
    "json",
]


@pytest.mark.parametrize(("data", "decode", "value"), CODECS, ids=IDS)
def test_whole(data: bytes, decode: Callable[[bytes], Any], value: Any) -> None:
    assert decode(data) == value
    assert decode(bytearray(data)) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(("data", "decode", "value"), CODECS, ids=IDS)
def test_cut_at_every_byte_and_with_trailing_bytes(
    data: bytes, decode: Callable[[bytes], Any], value: Any
) -> None:
    del value
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length])
    with pytest.raises(WireError):
        decode(data + b"x")


@pytest.mark.parametrize(("data", "decode", "value"), CODECS, ids=IDS)
def test_every_flipped_bit_is_another_value_or_an_error_and_never_a_crash(
    data: bytes, decode: Callable[[bytes], Any], value: Any
) -> None:
    for bit in range(8 * len(data)):
        bent = bytearray(data)
        bent[bit // 8] ^= 1 << (bit % 8)
        error = error_of(decode, bytes(bent))
        assert error is None or (error.code in ErrorCode and error.detail)


def error_of(decode: Callable[[bytes], Any], data: bytes) -> WireError | None:
    try:
        decode(data)
    except WireError as error:
        return error
    return None


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    for _, decode, _ in CODECS:
        error_of(decode, data)


def test_fetched_data_is_cut_into_the_partitions_it_belongs_to() -> None:
    body = [fetch_messages.encode_fetched(ENTRIES), b"helloxyz"]
    decoded = fetch_messages.decode_fetched(body)
    assert [entry for entry, _ in decoded] == ENTRIES
    assert [bytes(data) for _, data in decoded] == [b"hello", b"", b"xyz"]
    for bad in ([], [b"123"], [body[0], b"hell"], [body[0], b"helloxyzw"], [body[0][:-1], body[1]]):
        with pytest.raises(WireError):
            fetch_messages.decode_fetched(bad)


def test_batches_of_a_request_fill_its_frames_and_none_lies_across_two() -> None:
    def cut(lengths: list[int], *frames: bytes) -> list[bytes]:
        return [
            bytes(batch)
            for batch in produce_messages.cut_batches(
                [(TOPIC, 0, 0, length) for length in lengths], frames
            )
        ]

    assert cut([2, 3, 1], b"aabbb", b"c") == [b"aa", b"bbb", b"c"]
    assert cut([0, 2], b"aa") == [b"", b"aa"]
    for lengths, frames in [
        ([], []),
        ([1], [b"ab"]),
        ([2], [b"a", b"b"]),
        ([1, 1], [b"a"]),
        ([1], [b"a", b"b"]),
        ([2**32 - 1], [b"a"]),
    ]:
        with pytest.raises(WireError):
            cut(lengths, *frames)
    with pytest.raises(WireError, match="frames with batches"):
        cut([1] * 9, *[b"a"] * 9)


def test_what_a_request_was_answered_so_far_says_that_the_rest_has_timed_out() -> None:
    body = produce_messages.unanswered_batches(2)
    assert [produce_messages.is_answered(body, index) for index in range(2)] == [False, False]
    produce_messages.answer_batch(body, 1, *PRODUCED[0])
    assert [produce_messages.is_answered(body, index) for index in range(2)] == [False, True]
    unknown, known = produce_messages.decode_produced_batches(body)
    assert (unknown.error, known) == (ErrorCode.TIMED_OUT, PRODUCED[0])


@pytest.mark.parametrize("count", [0, produce_messages.PRODUCE_BATCHES_MAX + 1, 2**32 - 1])
def test_a_count_of_batches_out_of_range_is_refused_before_anything_is_allocated(
    count: int,
) -> None:
    data = bytearray(produce_messages.encode_produce_batches(BATCHES))
    data[8:12] = count.to_bytes(4, "little")
    with pytest.raises(WireError) as caught:
        produce_messages.decode_produce_batches(bytes(data))
    assert caught.value.code is ErrorCode.REQUEST_TOO_LARGE


@pytest.mark.parametrize("count", [1, 2])
def test_a_trace_behind_the_entries_is_read_since_version_3_and_refused_before(count: int) -> None:
    traced = produce_messages.ProduceBatches(
        1, 100, [(bytes(16), 0, 0, 9)] * count, b"0123456789abcdef"
    )
    data = produce_messages.encode_produce_batches(traced)
    assert produce_messages.decode_produce_batches(data, 3) == traced
    assert produce_messages.decode_produce_batches(data[:-16], 3) == traced._replace(trace_id=b"")
    for frame, version in ((data, 2), (data[:-1], 3), (data + b"x", 3), (data[:-17], 3)):
        with pytest.raises(WireError) as caught:
            produce_messages.decode_produce_batches(frame, version)
        assert caught.value.code is ErrorCode.MALFORMED_REQUEST


def test_a_count_in_the_bytes_allocates_nothing_before_it_is_checked() -> None:
    data = bytearray(fetch_messages.encode_fetch(FETCH))
    data[12:16] = b"\xff\xff\xff\xff"
    with pytest.raises(WireError) as caught:
        fetch_messages.decode_fetch(bytes(data))
    assert caught.value.code is ErrorCode.REQUEST_TOO_LARGE


def test_body_length_must_be_what_came() -> None:
    check_body(5, [b"ab", b"cde"])
    with pytest.raises(WireError, match="claims 6 body bytes; 5 arrived"):
        check_body(6, [b"ab", b"cde"])


def test_large_json_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(WireError) as caught:
        rq.decode_json(b" " * ((1 << 20) + 1))
    assert caught.value.code is ErrorCode.REQUEST_TOO_LARGE


def test_every_error_code_has_a_row_with_sentences() -> None:
    for code, row in ERROR_TABLE.items():
        assert row.code is code
        assert row.meaning.endswith(".")
        assert row.advice.endswith(".")
    assert code_of(60000) is ErrorCode.INTERNAL_ERROR


class TestSession:
    """The client's state machine."""

    def ready(self) -> ClientSession:
        session = ClientSession("test")
        frames = session.start()
        header = decode_request_header(frames[0])
        assert orjson.loads(frames[1])["client_id"] == "test"
        versions = {str(int(api)): 1 for api in Api if api is not Api.CREDIT}
        answer = orjson.dumps({"versions": versions, "cluster_id": "c"})
        session.receive(
            encode_response(Api.HANDSHAKE, 1, header.correlation_id, 0, 1000, 42, [answer])
        )
        return session

    def test_handshake_makes_it_ready_with_credit(self) -> None:
        session = self.ready()
        assert session.state is State.READY
        assert (session.credit_limit, session.generation) == (1000, 42)
        assert session.may_send(1000)
        session.sent_bytes = 1
        assert not session.may_send(1000)

    def test_answers_are_matched_by_correlation_id(self) -> None:
        session = self.ready()
        first, _ = session.request(Api.PING)
        second, _ = session.request(Api.PING)
        assert first != second
        response = session.receive(encode_response(Api.PING, 1, second, 0, 2000, 42))
        assert response is not None
        assert response.correlation_id == second
        assert session.credit_limit == 2000

    def test_an_api_without_common_version_is_refused_here(self) -> None:
        with pytest.raises(WireError) as caught:
            self.ready().request(Api.CREDIT, [credit_messages.encode_credit(1)])
        assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION

    def test_more_json_than_a_request_may_have_is_refused_here(self) -> None:
        """The appliance would refuse it, or close the connection: the client would send it again
        for ever.
        """
        session = self.ready()
        session.request(Api.END_TRANSACTION, [bytes(JSON_MAX_BYTES)])
        with pytest.raises(WireError, match="END_TRANSACTION would have 1048577 bytes") as caught:
            session.request(Api.END_TRANSACTION, [bytes(JSON_MAX_BYTES + 1)])
        assert caught.value.code is ErrorCode.REQUEST_TOO_LARGE
        session.request(Api.PRODUCE, [b"", bytes(JSON_MAX_BYTES + 1)])

    @pytest.mark.parametrize(
        ("code", "generation"), [(ErrorCode.SESSION_UNKNOWN, 42), (ErrorCode.OK, 43)]
    )
    def test_another_generation_or_an_unknown_session_loses_it(
        self, code: ErrorCode, generation: int
    ) -> None:
        session = self.ready()
        assert session.receive(encode_response(Api.PING, 1, 2, code, 0, generation)) is None
        assert session.state is State.LOST

    def test_a_refused_handshake_says_why(self) -> None:
        session = ClientSession("test")
        session.start()
        body = orjson.dumps({"message": "no version in common"})
        session.receive(
            encode_response(Api.HANDSHAKE, 1, 1, ErrorCode.UNSUPPORTED_VERSION, 0, 1, [body])
        )
        assert (session.state, session.lost_code, session.lost_reason) == (
            State.LOST,
            ErrorCode.UNSUPPORTED_VERSION,
            "no version in common",
        )

    def test_garbage_from_the_other_side_is_an_error_and_not_a_crash(self) -> None:
        for frames in ([], [b"garbage"], [encode_request(Api.PING, 1, 1)[0]]):
            with pytest.raises(WireError):
                self.ready().receive(frames)


def test_json_is_nested_32_deep_and_no_deeper() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' * depth + b"1" + b"}" * depth

    assert rq.decode_json(nested(rq.JSON_DEPTH_MAX))
    for depth in (rq.JSON_DEPTH_MAX + 1, 300, 1_000, 100_000):
        with pytest.raises(WireError) as caught:
            rq.decode_json(nested(depth))
        assert caught.value.code is ErrorCode.MALFORMED_REQUEST
    lists = rq.JSON_DEPTH_MAX - 1
    assert rq.decode_json(b'{"a":' + b"[" * lists + b"]" * lists + b"}")
    with pytest.raises(WireError):
        rq.decode_json(b'{"a":[' + b"[" * lists + b"]" * lists + b"]}")
    flat = b'{"a":[' + b",".join([b'{"b":"["}'] * 100) + b"]}"
    assert len(rq.decode_json(flat)["a"]) == 100, "many levels, and none deep"


def test_an_answer_that_is_too_large_for_its_way_is_refused_and_an_error_is_cut() -> None:
    code, body = rq.encode_reply(ErrorCode.OK, {"rows": ["x" * 100] * 100}, 5_000)
    assert code is ErrorCode.REQUEST_TOO_LARGE
    assert b"ask for less" in body
    assert (
        len(rq.encode_reply(ErrorCode.UNKNOWN_TOPIC, {"message": "x" * 200_000}, 5_000)[1]) < 1_100
    )
    assert rq.decode_json(rq.encode_error("\ud800"))["message"] == "?"


def test_version_2_of_fetch_has_no_flags_and_hears_of_nothing_left_out() -> None:
    entries = [entry._replace(flags=0, last_stable_offset=-1) for entry in ENTRIES]
    entries[2] = entries[2]._replace(resume_offset=-1)
    decoded = fetch_messages.decode_fetched(
        [fetch_messages.encode_fetched(ENTRIES, 2), b"helloxyz"], 2
    )
    assert [entry for entry, _ in decoded] == entries
    asked = fetch_messages.decode_fetch(fetch_messages.encode_fetch(FETCH), 2)
    assert [entry.flags for entry in asked.entries] == [0, 0]


def test_an_unknown_flag_of_a_fetch_is_refused() -> None:
    request = FETCH._replace(entries=[fetch_messages.FetchEntry(TOPIC, 0, -1, 12, 4096, 2)])
    with pytest.raises(WireError, match="unknown flags"):
        fetch_messages.decode_fetch(fetch_messages.encode_fetch(request))
