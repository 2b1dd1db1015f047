"""Batches fill while requests are under way, and leave together when an answer has come."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import DeliveryTimeoutError, TailraceError
from tailrace.format.record_batch.batch_header import REMEMBERED_BATCHES, REMEMBERED_BATCHES_ONCE
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.sending.in_flight_requests import OWN_FRAME_BYTES, SLOW_NS, InFlightRequest
from tailrace.producer.sending.sender import Sender
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import PRODUCE_FRAMES_MAX
from tests.kit.peers.scripted_front import MS, Driven, ScriptedFront

Made = Callable[..., Driven]


@pytest.fixture
def made() -> Iterator[Made]:
    """A producer, with the front that the arguments with these names describe."""
    all_made: list[Driven] = []

    def make(
        *, produce_version: int = 2, partitions: int = 3, credit: int = 1 << 40, **settings: Any
    ) -> Driven:
        driven = Driven(ScriptedFront(produce_version, partitions, credit), **settings)
        all_made.append(driven)
        return driven

    yield make
    for driven in all_made:
        driven.close()


def send(driven: Driven, partition: int, count: int = 1, size: int = 10) -> list[Any]:
    return [driven.producer.send("t", b"v" * size, partition=partition) for _ in range(count)]


def frame(size: int) -> pa.Table:
    return pa.table({"value": pa.array([b"x" * size], pa.binary())})


@pytest.mark.parametrize("version", [1, 2])
def test_without_linger_a_record_leaves_at_once_when_nothing_is_under_way(
    made: Made, version: int
) -> None:
    driven = made(produce_version=version, linger_ms=0)
    (handle,) = send(driven, 0)
    assert [asked.places for asked in driven.front.asked] == [[(0, 0, 1)]]
    driven.front.answer()
    driven.turn()
    assert handle.result(0).offset == 0


def test_what_comes_while_a_request_is_under_way_leaves_with_its_answer_in_one_request_across_partitions(  # noqa: E501
    made: Made,
) -> None:
    driven = made(linger_ms=0)
    send(driven, 0)
    later = send(driven, 0, 40) + send(driven, 1, 20) + send(driven, 2, 10)
    assert driven.front.asked_count == 1
    driven.front.answer()
    driven.turn()
    (asked,) = driven.front.asked
    assert sorted(asked.places) == [(0, 1, 40), (1, 0, 20), (2, 0, 10)]
    assert asked.frame_count == 1, "small batches are joined"
    driven.front.answer()
    driven.turn()
    assert [handle.result(0).offset for handle in later] == [*range(1, 41), *range(20), *range(10)]
    assert driven.producer.metrics()["requests_sent"] == 2
    assert driven.producer.metrics()["batches_sent"] == 4


def test_linger_is_over_while_a_request_is_under_way_and_the_batch_goes_on_filling(
    made: Made,
) -> None:
    driven = made(linger_ms=5)
    send(driven, 0)
    driven.turn(6)
    send(driven, 0, 3)
    driven.turn(6)
    send(driven, 0, 2)
    assert driven.front.asked_count == 1
    driven.front.answer()
    driven.turn()
    assert driven.front.asked[0].places == [(0, 1, 5)]


def test_lingering_batches_do_not_leave_before_their_time_with_others(made: Made) -> None:
    driven = made(linger_ms=50)
    send(driven, 0)
    driven.turn(40)
    send(driven, 1)
    driven.turn(11)
    assert driven.front.asked[0].places == [(0, 0, 1)]
    driven.front.answer()
    driven.turn(1)
    assert not driven.front.asked
    driven.turn(40)
    assert driven.front.asked[0].places == [(1, 0, 1)]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limit", [1, 5])
def test_not_more_requests_than_the_setting_says_are_under_way(
    made: Made, version: int, limit: int
) -> None:
    driven = made(
        produce_version=version,
        partitions=20,
        max_in_flight_requests_per_connection=limit,
        batch_size=4096,
    )
    for partition in range(20):
        send(driven, partition, 2, 5000)
        assert len(driven.front.asked) <= limit
    assert len(driven.front.asked) == limit
    most = 0
    while driven.front.asked:
        driven.front.answer()
        driven.turn()
        most = max(most, len(driven.front.asked))
    assert most <= limit
    assert driven.producer.metrics()["batches_in_flight"] == 0
    driven.turn(10)
    while driven.front.asked:
        driven.front.answer()
        driven.turn()
    assert driven.producer.metrics()["buffered_bytes"] == 0
    assert driven.producer.metrics()["records_sent"] == 40


def test_full_batches_leave_beside_a_request_of_unfilled_ones(made: Made) -> None:
    driven = made(linger_ms=0, batch_size=8192)
    send(driven, 0)
    send(driven, 1, 2, 4000)
    assert [asked.places for asked in driven.front.asked] == [[(0, 0, 1)], [(1, 0, 1)]]


@pytest.mark.parametrize("idempotent", [True, False])
def test_with_one_request_under_way_records_of_a_partition_keep_their_order_when_one_is_refused(
    made: Made, idempotent: bool
) -> None:
    driven = made(
        max_in_flight_requests_per_connection=1,
        enable_idempotence=idempotent,
        batch_size=1024,
        linger_ms=0,
    )
    handles = send(driven, 0, 30, 500)
    appended: list[int] = []
    is_refused = False
    for _ in range(200):
        if not driven.front.asked:
            driven.turn(200)
            continue
        asked = driven.front.asked[0]
        assert len(asked.batches) == 1 or idempotent, (
            "a later one could be appended before an earlier one that is sent again"
        )
        codes = [ErrorCode.OK] * len(asked.batches)
        if appended and not is_refused:
            is_refused, codes = (
                True,
                [
                    ErrorCode.TIMED_OUT if n == 0 else ErrorCode.OUT_OF_ORDER_SEQUENCE
                    for n in range(len(codes))
                ],
            )
        driven.front.answer(asked, codes)
        appended += [
            batch.header.record_count
            for batch, code in zip(asked.batches, codes, strict=True)
            if code is ErrorCode.OK
        ]
        driven.turn()
    assert is_refused
    assert sum(appended) == 30
    assert [handle.result(0).offset for handle in handles] == list(range(30))


def test_entries_are_settled_one_by_one(made: Made) -> None:
    driven = made(linger_ms=20, retries=0)
    handles = send(driven, 0) + send(driven, 1) + send(driven, 2)
    driven.turn(21)
    driven.front.answer(codes=[ErrorCode.OK, ErrorCode.RECORD_TOO_LARGE, ErrorCode.OK])
    driven.turn()
    assert [handle.exception(0) is None for handle in handles] == [True, False, True]
    assert handles[2].result(0).offset == 0


def test_an_entry_that_has_timed_out_is_sent_again_alone_with_its_sequence(made: Made) -> None:
    driven = made(linger_ms=20)
    handles = send(driven, 0) + send(driven, 1)
    driven.turn(21)
    driven.front.answer(codes=[ErrorCode.OK, ErrorCode.TIMED_OUT])
    driven.turn()
    assert handles[0].done()
    assert not handles[1].done()
    driven.turn(200)
    assert driven.front.asked[0].places == [(1, 0, 1)]
    driven.front.answer()
    driven.turn()
    assert handles[1].result(0).offset == 0


def test_a_request_that_is_refused_as_a_whole_is_sent_again_whole(made: Made) -> None:
    driven = made(linger_ms=20)
    send(driven, 0)
    send(driven, 1)
    driven.turn(21)
    first = driven.front.refuse(ErrorCode.TIMED_OUT)
    driven.turn()
    driven.turn(2000)
    assert sorted(driven.front.asked[0].places) == sorted(first.places)


@pytest.mark.parametrize("version", [1, 2])
def test_a_lost_connection_sends_everything_again_in_order_and_with_its_sequences(
    made: Made, version: int
) -> None:
    driven = made(produce_version=version, batch_size=1024, linger_ms=0)
    handles = send(driven, 0, 6, 600)
    sent = [place for asked in driven.front.asked for place in asked.places]
    assert len(sent) > 1
    driven.front.restart()
    driven.turn()
    driven.turn(1500)
    assert [place for asked in driven.front.asked for place in asked.places][: len(sent)] == sent
    while driven.front.asked:
        driven.front.answer()
        driven.turn(10)
    assert [handle.result(0).offset for handle in handles] == list(range(6))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0" * 8,
        b"\0" * 50,
        produce_messages.encode_produced_batches(
            [produce_messages.ProducedEntry(0, 0, 0, 0, 0)] * 2
        ),
    ],
)
def test_an_answer_that_tells_of_other_batches_ends_the_connection_and_no_record(
    made: Made, body: bytes
) -> None:
    driven = made(linger_ms=0)
    (handle,) = send(driven, 0)
    driven.front.answer_oddly(body)
    driven.turn()
    assert not handle.done()
    driven.turn(1500)
    driven.front.answer()
    driven.turn()
    assert handle.result(0).offset == 0


def test_all_bytes_of_a_request_are_within_credit(made: Made) -> None:
    driven = made(linger_ms=20, credit=5000)
    for partition in range(3):
        send(driven, partition, 1, 1500)
    driven.turn(21)
    sent = sum(batch.byte_count for asked in driven.front.asked for batch in asked.batches)
    assert 0 < sent <= 5000
    assert driven.front.asked[0].places == [(0, 0, 1), (1, 0, 1)]
    driven.front.answer()
    driven.front.grant(5000)
    driven.turn()
    assert driven.front.asked[0].places == [(2, 0, 1)]


def test_what_lacks_credit_leaves_at_once_when_more_has_come_that_nobody_has_read(
    made: Made,
) -> None:
    driven = made(linger_ms=0, credit=2500)
    send(driven, 0, 1, 1500)
    driven.front.answer()
    driven.turn()
    driven.front.grant(5000)
    send(driven, 0, 1, 1500)
    assert driven.front.asked_count == 2


def test_a_request_has_at_most_max_request_size_bytes(made: Made) -> None:
    driven = made(linger_ms=20, max_request_size=23_000, partitions=9)
    for partition in range(9):
        send(driven, partition, 1, 6000)
    driven.turn(21)
    sizes = []
    while driven.front.asked:
        sizes.append(sum(batch.byte_count for batch in driven.front.asked[0].batches))
        driven.front.answer()
        driven.turn()
    assert len(sizes) == 3
    assert max(sizes) <= 23_000


def test_large_batches_are_frames_of_their_own_and_never_too_many(made: Made) -> None:
    driven = made(partitions=12, max_request_size=8 << 20, max_in_flight_requests_per_connection=1)
    driven.producer.send_arrow("t", frame(10), partition=0)
    for partition in range(12):
        driven.producer.send_arrow(
            "t", frame(OWN_FRAME_BYTES if partition % 2 else 100), partition=partition
        )
    driven.front.answer()
    driven.turn()
    assert driven.front.asked[0].frame_count == PRODUCE_FRAMES_MAX
    assert len(driven.front.asked[0].batches) == PRODUCE_FRAMES_MAX
    driven.front.answer()
    driven.turn()
    assert [place[0] for place in driven.front.asked[0].places] == [8, 9, 10, 11]


def test_the_helper_is_rung_once_for_all_batches_that_begin_before_it_looks(made: Made) -> None:
    driven = made(partitions=20, linger_ms=5)
    sender = driven.producer._sender_thread
    send(driven, 0)
    driven.turn(6)
    driven.front.answer()
    driven.turn()
    for _ in range(2):
        sender.helper.run_timers()
        for partition in range(20):
            send(driven, partition)
        assert os.eventfd_read(sender.helper.wake_fd) == 1
        driven.turn(6)
        driven.front.answer()


def test_a_worker_that_stands_still_holds_back_its_own_partitions_only(made: Made) -> None:
    driven = made(linger_ms=0, max_in_flight_requests_per_connection=1)
    send(driven, 0)
    stuck = driven.front.asked[0]
    send(driven, 0)
    (other,) = send(driven, 1)
    driven.turn()
    assert driven.front.asked == [stuck]
    driven.turn(SLOW_NS / MS)
    assert [asked.places for asked in driven.front.asked] == [[(0, 0, 1)], [(1, 0, 1)]]
    driven.front.answer(driven.front.asked[1])
    driven.turn()
    assert other.result(0).offset == 0
    assert driven.front.asked == [stuck]
    driven.front.answer(stuck)
    driven.turn()
    assert driven.front.asked[0].places == [(0, 1, 1)]


def test_records_that_are_given_up_do_not_hold_a_request_s_place_for_ever(made: Made) -> None:
    driven = made(linger_ms=0, delivery_timeout_ms=300, enable_idempotence=False)
    (first,) = send(driven, 0)
    driven.turn(301)
    assert isinstance(first.exception(0), DeliveryTimeoutError)
    driven.front.answer()
    (second,) = send(driven, 0)
    driven.turn()
    driven.front.answer()
    driven.turn()
    assert second.result(0).offset == 1


@pytest.mark.parametrize(
    ("version", "window"), [(1, REMEMBERED_BATCHES_ONCE), (2, REMEMBERED_BATCHES)]
)
def test_a_partition_never_has_more_under_way_than_its_worker_remembers(
    made: Made, version: int, window: int
) -> None:
    driven = made(produce_version=version)
    handles = [driven.producer.send_arrow("t", frame(100), partition=0) for _ in range(3 * window)]
    sent = 0
    for _ in range(200):
        under_way = [place for asked in driven.front.asked for place in asked.places]
        sent = max(sent, len(under_way))
        if not under_way:
            break
        # The newest first: then the oldest one's fate is the one that is not known.
        assert max(place[1] for place in under_way) - min(place[1] for place in under_way) < window
        driven.front.answer(driven.front.asked[-1])
        driven.turn(1)
    assert sent <= window
    assert all(handle.done() for handle in handles)


def test_requests_of_one_partition_s_batches_follow_one_another(made: Made) -> None:
    driven = made()
    for _ in range(3 * REMEMBERED_BATCHES):
        driven.producer.send_arrow("t", frame(100), partition=0)
    for _ in range(10):
        for asked in list(driven.front.asked):  # all answers come at once
            driven.front.answer(asked)
        driven.turn(1)
        if driven.producer.metrics()["batches_in_flight"] >= REMEMBERED_BATCHES - 1:
            break
    assert len(driven.front.asked) >= 2, "all that may be under way left in one request"


@pytest.mark.parametrize("batch_size", [1024, 4 << 20])
def test_a_frame_is_cut_by_bytes_whatever_batch_size_says(made: Made, batch_size: int) -> None:
    driven = made(batch_size=batch_size)
    table = pa.table({"value": pa.array([b"x" * 1000] * 3000, pa.binary())})
    handle = driven.producer.send_arrow("t", table, partition=1)
    sizes: list[int] = []
    counts: list[int] = []
    while driven.front.asked:
        for batch in driven.front.asked[0].batches:
            sizes.append(batch.byte_count)
            counts.append(batch.header.record_count)
        driven.front.answer()
        driven.turn(1)
    assert counts == [1000, 1000, 1000]
    assert max(sizes) <= 1 << 20
    assert [found.base_offset for found in handle.result(0)] == [0, 1000, 2000]


@pytest.mark.parametrize("settings", [{"max_request_size": 50_000}, {"buffer_memory": 200_000}])
def test_a_frame_is_cut_to_what_a_request_and_the_buffer_may_hold(
    made: Made, settings: dict[str, int]
) -> None:
    driven = made(**settings)
    uneven = pa.table({"value": pa.array([b"x"] * 500 + [b"y" * 3000] * 20, pa.binary())})
    handle = driven.producer.send_arrow("t", uneven, partition=0)
    count = 0
    while driven.front.asked:
        assert all(batch.byte_count <= 50_000 for batch in driven.front.asked[0].batches)
        count += sum(batch.header.record_count for batch in driven.front.asked[0].batches)
        driven.front.answer()
        driven.turn(1)
    assert count == 520
    assert handle.done()


def test_without_answers_requests_leave_one_after_the_other(made: Made) -> None:
    driven = made(acks=0, linger_ms=0)
    handles = [handle for _ in range(10) for handle in send(driven, 0)]
    assert driven.front.asked_count == 10
    assert all(handle.done() for handle in handles)


def test_a_send_in_the_midst_of_sending_leaves_with_the_next_request_and_none_twice(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = made(linger_ms=0)
    nested: list[Any] = []
    refused: list[TailraceError] = []

    def interrupted(
        body: InFlightRequest, *args: Any, ask: Callable[..., Any] = InFlightRequest.body
    ) -> Any:
        if not nested:  # as a signal's handler, or what the collector ends
            nested.extend(send(driven, 0) + send(driven, 1))
            with pytest.raises(TailraceError, match="interrupted the producer itself") as caught:
                nested[0].result(0)
            refused.append(caught.value)
        return ask(body, *args)

    monkeypatch.setattr(InFlightRequest, "body", interrupted)
    (first,) = send(driven, 0)
    places: list[tuple[int, int, int]] = []
    while driven.front.asked:
        places += driven.front.asked[0].places
        driven.front.answer()
        driven.turn()
    assert [handle.result(0).offset for handle in (first, *nested)] == [0, 1, 0]
    assert sorted(places) == [(0, 0, 1), (0, 1, 1), (1, 0, 1)]
    assert refused


def test_what_has_just_become_due_leaves_before_the_socket_is_asked_for_answers(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = made(linger_ms=0)
    socket: Any = driven.front._socket
    send(driven, 0)
    driven.front.answer()
    driven.turn()
    done: list[str] = []
    try_send, try_receive = socket.try_send, socket.try_receive

    def sending(frames: Any, *, copy: bool = True) -> bool:
        done.append("send")
        is_sent: bool = try_send(frames, copy=copy)
        return is_sent

    def receiving() -> Any:
        done.append("receive")
        return try_receive()

    monkeypatch.setattr(socket, "try_send", sending)
    monkeypatch.setattr(socket, "try_receive", receiving)
    send(driven, 0)
    assert done == ["send", "receive"], (
        "and it is asked once, or nobody would be woken by the answer"
    )


def test_an_answer_that_comes_while_sending_lets_the_next_request_leave_in_the_same_turn(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = made(produce_version=1, linger_ms=5)
    socket: Any = driven.front._socket
    try_send = socket.try_send

    def answered(frames: Any, *, copy: bool = True) -> bool:
        asked_count = driven.front.asked_count
        is_sent: bool = try_send(frames, copy=copy)
        if driven.front.asked_count > asked_count:
            driven.front.answer()
        return is_sent

    monkeypatch.setattr(socket, "try_send", answered)
    handles = [*send(driven, 0), *send(driven, 1), *send(driven, 2)]
    driven.turn(6)
    assert driven.front.asked_count == 3
    assert all(handle.done() for handle in handles)


@pytest.mark.parametrize("place", ["number", "close_open"])
def test_a_request_that_a_signal_has_cut_off_is_made_again_in_order(
    made: Made, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    driven = made(linger_ms=5)
    handles = [*send(driven, 0, 2), *send(driven, 1, 3), *send(driven, 2)]
    done, calls = getattr(PartitionQueue, place), []

    def cut_off(queue: PartitionQueue, *arguments: Any) -> Any:
        result = done(queue, *arguments)
        calls.append(queue.partition)
        if calls == [0, 1]:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(PartitionQueue, place, cut_off)
    with pytest.raises(KeyboardInterrupt):
        driven.turn(6)
    assert not driven.front.asked
    handles += send(driven, 0)
    for _ in range(3):
        driven.turn(6)
        while driven.front.asked:
            driven.front.answer()
            driven.turn()
    assert [handle.result(0).offset for handle in handles] == [0, 1, 0, 1, 2, 0, 2]


class Interruption:
    """A signal's handler that raises at the given one of the points at which Python runs handlers
    while a request is put together: where a function begins, and where one written in C has
    returned.
    """

    def __init__(self, point: int) -> None:
        self._left = point
        self.was_made = False

    def __call__(self, frame: types.FrameType, event: str, _argument: Any) -> None:
        if event not in ("call", "c_return") or self.was_made:
            return
        above: types.FrameType | None = frame
        while above is not None and above.f_code is not Sender._gather.__code__:
            above = above.f_back
        if above is None:
            return
        self._left -= 1
        if self._left < 0:
            self.was_made = True
            raise KeyboardInterrupt


# A signal that comes into a callback of the garbage collector, which hypothesis has, is ignored.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wherever_a_signal_cuts_off_what_gathers_batches_each_is_sent_once_in_order_and_the_books_are_right(  # noqa: E501
    made: Made,
) -> None:
    for point in range(10_000):
        driven = made(linger_ms=5)
        send(driven, 2)
        driven.turn(6)
        driven.front.answer()
        driven.turn()
        handles = [*send(driven, 0, 2), *send(driven, 1, 3)]
        interruption = Interruption(point)
        sys.setprofile(interruption)
        try:
            driven.turn(6)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        handles += [*send(driven, 0), *send(driven, 1)]
        places = []
        for _ in range(3):
            driven.turn(6)
            while driven.front.asked:
                places += driven.front.answer().places
                driven.turn()
        assert [handle.done() for handle in handles] == [True] * 7, point
        assert [handle.result(0).offset for handle in handles] == [0, 1, 0, 1, 2, 2, 3], point
        for partition, sent in ((0, 3), (1, 4)):
            sequence = 0
            for place in places:
                if place[0] == partition:
                    assert place[1] == sequence, point
                    sequence += place[2]
            assert sequence == sent, point
        accumulator = driven.producer._sender_thread.accumulator
        assert (
            accumulator.buffered_bytes,
            accumulator.incomplete_count,
            accumulator.in_flight_count,
        ) == (0, 0, 0), point
        if not interruption.was_made:
            break
    assert point > 50


def test_credit_is_asked_for_seldom_while_nothing_comes() -> None:
    """Hundreds of producers that wait for credit would ask so often that the appliance had no time
    to give any.
    """
    front = ScriptedFront(credit=0)
    driven = Driven(front, linger_ms=0)
    driven.producer.send("t", b"x", partition=0)
    driven.turn()
    for _ in range(8):
        driven.turn(milliseconds=55)
    assert front.credit_asked_count == 1
    driven.turn(milliseconds=100)
    assert front.credit_asked_count == 2
    front.grant(1 << 20)
    driven.turn()
    assert front.asked_count == 1
    driven.close()
