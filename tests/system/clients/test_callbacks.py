"""Callbacks that raise, send, flush and close: they cost a producer no other record."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable

import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import ClientClosedError, InvalidRecordError, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.hosts.programs import read_values
from tests.kit.processes import HANG_LIMIT_S, wait_until


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    return topic


def told(note: Callable[[int], None], number: int) -> Callable[[object, object], None]:
    """A callback that notes `number`."""

    def on_delivery(_metadata: object, _error: object) -> None:
        note(number)

    return on_delivery


def test_a_callback_that_raises_is_logged_and_costs_no_other(
    appliance: EmbeddedAppliance, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []

    def note(number: int) -> None:
        ended.append(number)
        if number % 2:
            raise RuntimeError(f"record {number} is not to my liking")

    with (
        Producer(appliance.address, linger_ms=1) as producer,
        caplog.at_level(logging.ERROR, "tailrace"),
    ):
        for number in range(10):  # one batch; the helper thread finds out
            producer.send(made, b"x", on_delivery=told(note, number))
        wait_until(lambda: len(ended) == 10, "every callback is called")
        producer.send(made, b"y", on_delivery=told(note, 11))
        wait_until(lambda: len(ended) == 11, "linger and callbacks go on after one has raised")
        for number in (13, 15):  # the same where the caller's own thread finds out
            producer.send(made, b"z", on_delivery=told(note, number))
        producer.flush(60)
        wait_until(lambda: len(ended) == 13, "flush calls them")
        producer.send(made, b"w", on_delivery=told(note, 17)).result(60)
        wait_until(lambda: len(ended) == 14, "so does waiting for a record")
        producer.send(made, b"v", on_delivery=told(note, 19))
    assert ended == [*range(10), 11, 13, 15, 17, 19], "close() calls what is left"
    logged = [record for record in caplog.records if record.exc_info is not None]
    assert {record.name for record in logged} == {"tailrace"}
    said = [str(record.exc_info[1]) for record in logged if record.exc_info is not None]
    assert sorted(said) == sorted(
        f"record {number} is not to my liking" for number in ended if number % 2
    )


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_callback_reaches_the_caller_and_the_other_callbacks_are_made(
    appliance: EmbeddedAppliance, made: str, raised: type[BaseException]
) -> None:
    ended: list[int] = []

    def note(number: int) -> None:
        ended.append(number)
        if number == 0 and threading.current_thread() is threading.main_thread():
            raise raised

    with Producer(appliance.address, linger_ms=60_000) as producer:
        for number in range(5):
            producer.send(made, b"x", on_delivery=told(note, number))
        with contextlib.suppress(raised):  # the helper may have been faster
            producer.flush(60)
        wait_until(lambda: len(ended) == 5, "the other callbacks are made")
        producer.send(made, b"y").result(60)
    assert ended == [0, 1, 2, 3, 4]


def test_a_callback_that_ends_its_thread_does_not_end_the_helper(
    appliance: EmbeddedAppliance, made: str
) -> None:
    ended: list[int] = []

    def note(number: int) -> None:
        ended.append(number)
        if number == 0:
            sys.exit(1)

    with Producer(appliance.address, linger_ms=1) as producer:
        for number in range(3):
            producer.send(made, b"x", on_delivery=told(note, number))
        wait_until(lambda: len(ended) == 3, "the helper makes all of them")
        producer.send(made, b"y", on_delivery=told(note, 3))
        wait_until(lambda: len(ended) == 4, "and lives")


def test_a_callback_may_send_flush_and_close_its_producer(
    appliance: EmbeddedAppliance, made: str
) -> None:
    done = threading.Event()
    producer = Producer(appliance.address, linger_ms=1)

    def close(*_: object) -> None:
        producer.close(10)
        done.set()

    def send_more(*_: object) -> None:
        producer.send(made, b"second").result(60)
        producer.send(made, b"third")
        producer.flush(60)
        producer.send(made, b"fourth", on_delivery=close)

    producer.send(made, b"first", on_delivery=send_more)
    assert done.wait(HANG_LIMIT_S)
    assert read_values(appliance, made, 4) == [b"first", b"second", b"third", b"fourth"]
    with pytest.raises(ClientClosedError):
        producer.send(made, b"fifth")
    producer._sender_thread.helper.thread.join(HANG_LIMIT_S)
    assert not producer._sender_thread.helper.thread.is_alive()


def test_a_batch_that_cannot_be_encoded_fails_its_own_records_only(
    appliance: EmbeddedAppliance, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tailrace.producer.batches.producer_batch import ProducerBatch

    with Producer(appliance.address, linger_ms=1) as producer:
        producer.send(made, b"good").result(60)
        real = ProducerBatch.encode

        def encode(batch: ProducerBatch, compression: str) -> bytearray:
            if b"poison" in batch.rows.values():
                raise MemoryError("no room for this")
            return real(batch, compression)

        monkeypatch.setattr(ProducerBatch, "encode", encode)
        poisoned = producer.send(made, b"poison")
        wait_until(poisoned.done, "the helper ends it")
        assert isinstance(poisoned.exception(), InvalidRecordError)
        assert producer.send(made, b"good again").result(60).offset == 1


def test_a_helper_that_fails_again_and_again_ends_every_handle(
    appliance: EmbeddedAppliance,
    made: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("tailrace.producer.sending.helper_thread.PAUSE_NS", 1_000_000)
    producer = Producer(appliance.address, linger_ms=200)
    producer.send(made, b"good").result(60)

    def broken(now_ns: int, *, sends_first: bool = False) -> None:
        raise LookupError("what nobody expected")

    with caplog.at_level(logging.ERROR, "tailrace"):
        handle = producer.send(made, b"x")
        producer._sender_thread.sender.run_once = broken  # type: ignore[method-assign]
        wait_until(handle.done, "the handle ends")
        assert "what nobody expected" in str(handle.exception())
        with pytest.raises(TailraceError, match="what nobody expected"):
            producer.send(made, b"y")
    assert any("helper" in record.message for record in caplog.records)
    producer.close(1)


@pytest.mark.parametrize("count", [1, 200])
def test_what_callbacks_send_while_the_producer_closes_is_delivered(
    appliance: EmbeddedAppliance, made: str, count: int
) -> None:
    """Also what the callbacks of those records send, in turn."""
    with Producer(appliance.address, linger_ms=1_000) as producer:

        def answer(number: int) -> Callable[[object, object], None]:
            def on_delivery(_metadata: object, _error: object) -> None:
                if number < 3 * count:
                    later = number + count
                    producer.send(made, b"%d" % later, on_delivery=answer(later))

            return on_delivery

        for number in range(count):
            producer.send(made, b"%d" % number, on_delivery=answer(number))
    values = read_values(appliance, made, 4 * count)
    assert sorted(int(value or b"-1") for value in values) == list(range(4 * count))


def test_a_close_ends_while_callbacks_send_for_ever(
    appliance: EmbeddedAppliance, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The send that comes too late raises in its callback, which is logged."""
    calls: list[int] = []
    with Producer(appliance.address) as producer, caplog.at_level(logging.ERROR, "tailrace"):

        def on_delivery(_metadata: object, _error: object) -> None:
            calls.append(1)
            producer.send(made, b"x", on_delivery=on_delivery)

        producer.send(made, b"x", on_delivery=on_delivery)
        producer.close()
    assert len(calls) > 5
    assert "on_delivery raised" in caplog.text


def test_a_close_ends_though_a_callback_of_the_helper_thread_does_not(
    appliance: EmbeddedAppliance, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    began, may_end = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def on_delivery(_metadata: object, _error: object) -> None:
        threads.append(threading.current_thread())
        began.set()
        may_end.wait(HANG_LIMIT_S)

    producer = Producer(appliance.address)
    try:
        producer.send(made, b"x", on_delivery=on_delivery)  # nobody waits: the helper receives
        assert began.wait(HANG_LIMIT_S)
        with caplog.at_level(logging.WARNING, "tailrace"):
            producer.close(0)
        assert "one of its callbacks had not returned" in caplog.text
        assert threads[0].is_alive()
    finally:
        may_end.set()
    threads[0].join(HANG_LIMIT_S)
    assert not threads[0].is_alive()
