"""A signal's handler raises at each point of a producer's calls: what was accepted is delivered
once, in order, and the producer goes on.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from tailrace.core.errors import TailraceError
from tests.conformance.interrupts import Interrupt, at, points
from tests.conformance.logging_front import DrivenProducer, LoggingFront
from tests.kit.peers.scripted_front import _Socket

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Python throws away the exceptions of a handler that runs while an object is destroyed."""
LARGE = 20_000
"""Three such values fill a buffer_memory of 64 KiB."""
REFRESH_MS = 120
"""A refusal as too large asks for the topic's settings, which come after a pause."""


class Program:
    """A program that sends numbered records to partition 0, and remembers what was accepted."""

    def __init__(self, **settings: Any) -> None:
        self.front = LoggingFront(partitions=2)
        self.driven = DrivenProducer(self.front, buffer_memory=65536, linger_ms=5, **settings)
        self.producer = self.driven.producer
        self._numbers = itertools.count()
        self.accepted: list[bytes] = []
        self.attempted: list[bytes] = []
        self.handles: list[Any] = []
        self.called: list[bytes] = []
        """Values whose on_delivery was called, each time it was."""
        self.with_callback: list[bytes] = []

    def value(self, size: int = 0) -> bytes:
        value = b"%05d" % next(self._numbers)
        self.attempted.append(value)
        return value.ljust(size, b".")

    def send(self, size: int = 0, *, calls_back: bool = False, **more: Any) -> None:
        value = self.value(size)
        number = value[:5]
        if calls_back:
            self.with_callback.append(number)
            more["on_delivery"] = lambda _metadata, _error: self.called.append(number)
        handle = self.producer.send("t", value, partition=0, **more)
        self.accepted.append(number)
        self.handles.append(handle)

    def known(self) -> None:
        """The topic is known, and its producer has its id."""
        self.send()
        self.producer.flush()

    def filled(self) -> None:
        """There is no room for another LARGE record, and no answer comes before somebody sleeps."""
        self.known()
        self.front.is_holding = True
        for _ in range(3):
            self.send(LARGE, calls_back=True)

    def check(self, where: str) -> None:
        """After the interrupt the program goes on."""
        self.front.is_holding = False
        started_ns = self.driven.now_ns
        self.send(calls_back=True)
        self.send(LARGE, headers=[("h", b"1")])
        self.send(LARGE)
        self.producer.flush(60)
        assert self.driven.now_ns - started_ns < 10_000_000_000, (
            f"it blocked after an interrupt at {where}"
        )
        found = [value[:5] for value in self.front.logs[0]]
        assert found == sorted(set(found)), (
            f"twice, or out of order, after an interrupt at {where}: {found}"
        )
        assert set(self.accepted) <= set(found), f"lost after an interrupt at {where}"
        assert set(found) <= set(self.attempted)
        assert [handle.result(0).offset for handle in self.handles] == [
            found.index(number) for number in self.accepted
        ], where
        requested = [number for number in self.with_callback if number in self.accepted]
        assert [number for number in self.called if number in requested] == requested, (
            f"callbacks after an interrupt at {where}"
        )
        assert len(set(self.called)) == len(self.called), (
            f"a callback was made twice after an interrupt at {where}"
        )
        accumulator = self.producer._sender_thread.accumulator
        assert (
            accumulator.buffered_bytes,
            accumulator.incomplete_count,
            accumulator.in_flight_count,
        ) == (0, 0, 0), where
        self.producer.close()


def _send_quickly(program: Program) -> Callable[[], object]:
    program.known()
    program.send()
    return program.send


def _open_a_batch(program: Program) -> Callable[[], object]:
    program.known()
    return program.send


def _first_send(program: Program) -> Callable[[], object]:
    return program.send


def _wait_for_room(program: Program) -> Callable[[], object]:
    program.filled()
    return lambda: program.send(LARGE, calls_back=True, headers=iter([("a", b"1")]))


def _flush(program: Program) -> Callable[[], object]:
    program.filled()
    return program.producer.flush


def _result(program: Program) -> Callable[[], object]:
    program.filled()
    return lambda: program.handles[-1].result(60)


def _turn(program: Program) -> Callable[[], object]:
    program.filled()
    program.front.is_holding = False
    program.driven.turn(6)
    return lambda: program.driven.turn(6)


def _turn_with_answers(program: Program) -> Callable[[], object]:
    program.filled()
    program.driven.turn(6)
    program.front.answer_all()
    return lambda: program.driven.turn(6)


def _split(program: Program) -> Callable[[], object]:
    """A batch of rows is refused as too large, and split. One of a frame waits behind it."""
    program.known()
    importlib.import_module("tailrace.producer.topic_changes.refused_sizes")
    program.front.batch_rows_max = 2
    program.front.is_holding = True
    for _ in range(3):
        program.send(calls_back=True)
    table = pa.table({"value": pa.array([program.value() for _ in range(3)], pa.binary())})
    program.producer.send_arrow("t", table, partition=0)
    program.driven.turn(6)
    program.front.answer_all()
    return lambda: program.driven.turn(REFRESH_MS)


def _send_halves(program: Program) -> Callable[[], object]:
    return _turn_behind(_split, program)


def _split_a_frame(program: Program) -> Callable[[], object]:
    """The halves are there; the batch of the frame is refused and split."""
    return _turn_behind(_send_halves, program)


def _halves_of_a_frame(program: Program) -> Callable[[], object]:
    """The halves of the frame are there, and the batch that was split is complete."""
    return _turn_behind(_split_a_frame, program)


def _turn_behind(
    prepare: Callable[[Program], Callable[[], object]], program: Program
) -> Callable[[], object]:
    prepare(program)()
    program.front.answer_all()
    return lambda: program.driven.turn(REFRESH_MS)


def _send_arrow(program: Program) -> Callable[[], object]:
    program.filled()
    rows = [program.value() for _ in range(20)]
    # The first array of a process imports pandas, and its first frame these: points of no call.
    table = pa.table({"value": pa.array(rows, pa.binary())})
    importlib.import_module("tailrace.batch.exact_floats")
    importlib.import_module("tailrace.batch.frame_encoder")
    importlib.import_module("tailrace.batch.frames")
    return lambda: program.producer.send_arrow("t", table, partition=0)


def _partitions(program: Program) -> Callable[[], object]:
    program.filled()
    return lambda: program.producer.partitions_for("t")


CALLS = [
    _send_quickly, _open_a_batch, _first_send, _wait_for_room, _flush, _result, _turn,
    _turn_with_answers, _split, _send_halves, _split_a_frame, _halves_of_a_frame, _send_arrow,
    _partitions,
]  # fmt: skip


@pytest.mark.parametrize("prepare", CALLS, ids=lambda prepare: prepare.__name__.strip("_"))
def test_a_signal_at_any_point_of_a_call_costs_nothing_that_was_accepted(
    prepare: Callable[[Program], Callable[[], object]],
) -> None:
    for point in points():
        program = Program()
        call = prepare(program)
        with at(point) as interruption:
            call()
        program.check(interruption.where)
        if not interruption.was_made:
            return


@pytest.mark.parametrize(
    "prepare",
    [_send_quickly, _open_a_batch, _first_send, _flush, _turn, _turn_with_answers],
    ids=lambda prepare: prepare.__name__.strip("_"),
)
def test_a_handler_or_a_destructor_may_send_at_any_point_of_a_call(
    prepare: Callable[[Program], Callable[[], object]],
) -> None:
    """The order of the two records is not promised. Both are delivered, once."""
    for point in points():
        program = Program()
        call = prepare(program)

        refusals: list[str] = []

        def handler(program: Program = program, refusals: list[str] = refusals) -> None:
            try:
                program.send()
            except TailraceError as error:  # it would have to wait, for room or for the topic
                refusals.append(str(error))

        with at(point, handler) as interruption:
            call()
        assert all("waits for this producer" in refusal for refusal in refusals)
        program.producer.flush()
        found = [value[:5] for value in program.front.logs[0]]
        assert sorted(found) == sorted(program.accepted), interruption.where
        assert all(handle.done() for handle in program.handles), interruption.where
        program.accepted.sort(key=found.index)
        program.handles.sort(key=lambda handle: handle.result(0).offset)
        program.producer.close()
        if not interruption.was_made:
            return


def test_a_signal_at_any_point_of_a_close_leaves_every_record_ended_and_the_next_close_ends_the_producer() -> (  # noqa: E501
    None
):
    for point in points():
        program = Program()
        program.filled()
        with at(point) as interruption:
            program.producer.close()
        program.producer.close()
        assert all(handle.done() for handle in program.handles), interruption.where
        found = [value[:5] for value in program.front.logs[0]]
        delivered = [
            number
            for number, handle in zip(program.accepted, program.handles, strict=True)
            if handle.exception(0) is None
        ]
        assert found == sorted(set(found)), interruption.where
        assert set(delivered) <= set(found), interruption.where
        with pytest.raises(TailraceError, match="closed"):
            program.producer.send("t", b"later")
        if not interruption.was_made:
            return


def test_a_socket_is_not_used_when_a_signal_comes_behind_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = Program()
    program.known()
    close = _Socket.close

    def is_cut_off(socket: _Socket) -> None:
        close(socket)
        monkeypatch.undo()
        raise Interrupt

    monkeypatch.setattr(_Socket, "close", is_cut_off)
    with pytest.raises(Interrupt):
        program.producer.close()
    program.producer.close()
    with pytest.raises(TailraceError, match="closed"):
        program.producer.send("t", b"later")
