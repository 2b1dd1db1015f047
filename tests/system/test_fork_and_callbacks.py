"""What a program may do around the SDK: callbacks that raise, send, flush and close; fork() at any moment; an exit without close()."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.errors import ClientClosedError, InvalidRecordError, RequestTimeoutError, TailraceError
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import children, wait_until

CHILD_TIMEOUT_S = 20
REFUSED, USED = 7, 9


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    return topic


def wait_for_child(pid: int) -> int:
    """Its exit code; one that hangs is killed, and the test fails."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()  # select() takes no descriptor above 1,023
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(CHILD_TIMEOUT_S * 1000):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(act: Callable[[], object]) -> int:
    """Fork; what came of `act` there: REFUSED (by the sentence about fork), USED, or 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = USED
        except ClientClosedError as error:
            code = REFUSED if "fork()" in str(error) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return wait_for_child(pid)


def told(note: Callable[[int], None], number: int) -> Callable[[object, object], None]:
    """A callback that notes `number`."""

    def on_delivery(_metadata: object, _error: object) -> None:
        note(number)

    return on_delivery


def run_program(text: str, *arguments: str, timeout_s: int = 60) -> subprocess.CompletedProcess[str]:
    """A program of its own, ended as Python ends one."""
    command = [sys.executable, "-P", "-X", "dev", "-c", text, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )


def read_values(appliance: EmbeddedAppliance, topic: str, count: int) -> list[bytes | None]:
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found: list[bytes | None] = []
        while len(found) < count:
            records = consumer.poll(10_000)
            assert records, f"only {len(found)} of {count} records came"
            found += [record.value for record in records]
        return found


# ---- callbacks -----------------------------------------------------------------------------------------------------------------------------


def test_a_callback_that_raises_is_logged_and_costs_no_other(
    appliance: EmbeddedAppliance, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []

    def note(number: int) -> None:
        ended.append(number)
        if number % 2:
            raise RuntimeError(f"record {number} is not to my liking")

    with Producer(appliance.address, linger_ms=1) as producer, caplog.at_level(logging.ERROR, "tailrace"):
        for number in range(10):  # one batch; the helper thread finds out
            producer.send(made, b"x", on_delivery=told(note, number))
        wait_until(lambda: len(ended) == 10, "every callback is called")
        producer.send(made, b"y", on_delivery=told(note, 11))
        wait_until(lambda: len(ended) == 11, "linger and callbacks go on after one has raised")
        for number in (13, 15):  # the same where the caller's own thread finds out
            producer.send(made, b"z", on_delivery=told(note, number))
        producer.flush(10)
        wait_until(lambda: len(ended) == 13, "flush calls them")
        producer.send(made, b"w", on_delivery=told(note, 17)).result(10)
        wait_until(lambda: len(ended) == 14, "so does waiting for a record")
        producer.send(made, b"v", on_delivery=told(note, 19))
    assert ended == [*range(10), 11, 13, 15, 17, 19], "close() calls what is left"
    logged = [record for record in caplog.records if record.exc_info is not None]
    assert {record.name for record in logged} == {"tailrace"}
    said = [str(record.exc_info[1]) for record in logged if record.exc_info is not None]
    assert sorted(said) == sorted(f"record {number} is not to my liking" for number in ended if number % 2)


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
            producer.flush(10)
        wait_until(lambda: len(ended) == 5, "the other callbacks are made")
        producer.send(made, b"y").result(10)
    assert ended == [0, 1, 2, 3, 4]


def test_a_callback_that_ends_its_thread_does_not_end_the_helper(appliance: EmbeddedAppliance, made: str) -> None:
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


def test_a_callback_may_send_flush_and_close_its_producer(appliance: EmbeddedAppliance, made: str) -> None:
    done = threading.Event()
    producer = Producer(appliance.address, linger_ms=1)

    def close(*_: object) -> None:
        producer.close(10)
        done.set()

    def send_more(*_: object) -> None:
        producer.send(made, b"second").result(10)
        producer.send(made, b"third")
        producer.flush(10)
        producer.send(made, b"fourth", on_delivery=close)

    producer.send(made, b"first", on_delivery=send_more)
    assert done.wait(20)
    assert read_values(appliance, made, 4) == [b"first", b"second", b"third", b"fourth"]
    with pytest.raises(ClientClosedError):
        producer.send(made, b"fifth")
    producer._sender._helper.join(20)
    assert not producer._sender._helper.is_alive()


def test_a_batch_that_cannot_be_encoded_fails_its_own_records_only(
    appliance: EmbeddedAppliance, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tailrace.producer_batch import ProducerBatch

    with Producer(appliance.address, linger_ms=1) as producer:
        producer.send(made, b"good").result(10)
        real = ProducerBatch.encode

        def encode(batch: ProducerBatch, compression: str) -> bytearray:
            if b"poison" in batch.rows:
                raise MemoryError("no room for this")
            return real(batch, compression)

        monkeypatch.setattr(ProducerBatch, "encode", encode)
        poisoned = producer.send(made, b"poison")
        wait_until(poisoned.done, "the helper ends it")
        assert isinstance(poisoned.exception(), InvalidRecordError)
        assert producer.send(made, b"good again").result(10).offset == 1


def test_a_helper_that_fails_again_and_again_ends_every_handle(
    appliance: EmbeddedAppliance, made: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tailrace.sender.HELPER_PAUSE_NS", 1_000_000)
    producer = Producer(appliance.address, linger_ms=200)
    producer.send(made, b"good").result(10)

    def broken(now_ns: int) -> None:
        raise LookupError("what nobody expected")

    with caplog.at_level(logging.ERROR, "tailrace"):
        handle = producer.send(made, b"x")
        producer._sender.delivery.turn = broken  # type: ignore[method-assign]
        wait_until(handle.done, "the handle ends")
        assert "what nobody expected" in str(handle.exception())
        with pytest.raises(TailraceError, match="what nobody expected"):
            producer.send(made, b"y")
    assert any("helper" in record.message for record in caplog.records)
    producer.close(1)


# ---- fork ----------------------------------------------------------------------------------------------------------------------------------


def test_a_child_forked_while_another_thread_holds_the_producer_is_refused_at_once(appliance: EmbeddedAppliance, made: str) -> None:
    with Producer(appliance.address) as producer:
        producer.send(made, b"known").result(10)
        holds, over = threading.Event(), threading.Event()

        def hold() -> None:
            with producer._sender.lock:
                holds.set()
                over.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        assert holds.wait(10)
        try:
            acts: list[Callable[[], object]] = [
                lambda: producer.send(made, b"x"),
                lambda: producer.send(made, b"x", headers=[("a", b"b")]),
                lambda: producer.send("another-topic", b"x"),
                lambda: producer.flush(1),
                lambda: producer.partitions_for(made),
            ]
            assert [in_child(act) for act in acts] == [REFUSED] * len(acts)
            assert in_child(producer.close) == USED, "close() in a child does nothing"
        finally:
            over.set()
            thread.join()
        assert producer.send(made, b"parent").result(10).offset == 1


def test_children_forked_under_load_never_hang_and_the_parent_loses_nothing(appliance: EmbeddedAppliance, made: str) -> None:
    with Producer(appliance.address, linger_ms=0) as producer:
        producer.send(made, b"0").result(10)
        over = threading.Event()
        sent = [1]

        def send() -> None:
            while not over.is_set() or sent[0] < 1000:
                producer.send(made, b"%d" % sent[0], headers=[("a", b"b")] if sent[0] % 3 else None)
                sent[0] += 1

        thread = threading.Thread(target=send)
        thread.start()
        try:
            for _ in range(15):
                assert in_child(lambda: producer.send(made, b"child")) == REFUSED
        finally:
            over.set()
            thread.join()
        producer.flush(20)
        assert producer.metrics()["errors"] == 0
    assert read_values(appliance, made, sent[0]) == [b"%d" % number for number in range(sent[0])]


def test_a_record_under_way_at_the_fork_cannot_be_waited_for_in_the_child(appliance: EmbeddedAppliance, made: str) -> None:
    flusher = children(appliance)["tr-flusher-0"]
    with Producer(appliance.address) as producer:
        producer.send(made, b"first").result(10)
        os.kill(flusher, signal.SIGSTOP)
        try:
            handle = producer.send(made, b"second")
            assert in_child(handle.result) == REFUSED
        finally:
            os.kill(flusher, signal.SIGCONT)
        assert handle.result(20).offset == 1


def test_consumer_and_admin_in_a_child_say_so_at_once(appliance: EmbeddedAppliance, made: str) -> None:
    key = TopicPartition(made, 0)
    with Producer(appliance.address) as producer:
        for number in range(1000):
            producer.send(made, b"%d" % number)
        producer.flush(10)
    with Consumer(made, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer, Admin(appliance.address) as admin:
        first = consumer.poll(10_000, 1)  # more of its batch is decoded, and not handed out yet
        admin.list_topics()
        acts: list[Callable[[], object]] = [
            lambda: consumer.poll(100),
            consumer.poll_arrow,
            lambda: next(iter(consumer)),
            lambda: consumer.seek(key, 0),
            lambda: consumer.position(key),
            lambda: consumer.end_offsets([key]),
            lambda: consumer.partitions_for(made),
            admin.list_topics,
            lambda: admin.create_topics([NewTopic("x")]),
            admin.describe_cluster,
        ]
        assert [in_child(act) for act in acts] == [REFUSED] * len(acts)
        assert in_child(consumer.close) == in_child(admin.close) == USED
        found = len(first)
        while found < 1000:
            found += len(consumer.poll(10_000))
        assert made in admin.list_topics()
    for act in (lambda: consumer.poll(0), admin.list_topics):
        with pytest.raises(ClientClosedError, match="is closed"):
            act()


def test_a_child_makes_clients_of_its_own(appliance: EmbeddedAppliance, made: str) -> None:
    def work() -> None:
        with Producer(appliance.address) as own:
            assert own.send(made, b"child").result(10).offset == 1
        with Consumer(made, bootstrap=appliance.address, auto_offset_reset="earliest") as own_consumer:
            assert own_consumer.poll(10_000)
        gc.collect()

    with Producer(appliance.address) as producer:
        producer.send(made, b"parent").result(10)
        assert in_child(work) == USED
        assert producer.send(made, b"parent").result(10).offset == 2


def _in_pool(address: str, topic: str) -> int:
    gc.collect()
    with Producer(address) as producer:
        return producer.send(topic, b"x").result(10).partition


def test_multiprocessing_by_fork_works_beside_live_clients(appliance: EmbeddedAppliance, made: str) -> None:
    with Producer(appliance.address) as producer, Consumer(made, bootstrap=appliance.address), Admin(appliance.address):
        producer.send(made, b"x").result(10)
        pool = multiprocessing.get_context("fork").Pool(2)
        try:
            answers = [pool.apply_async(_in_pool, (appliance.address, made)) for _ in range(4)]
            assert [answer.get(CHILD_TIMEOUT_S) for answer in answers] == [0] * 4
            pool.close()
        finally:
            pool.terminate()
            pool.join()
        producer.send(made, b"x").result(10)


CHILD_THAT_ENDS_NORMALLY = """
import gc, os, sys, threading
from tailrace import Admin, Consumer, Producer, embedded
from tailrace.errors import ClientClosedError
from tailrace.private_appliance import start_embedded
inherited = None
with embedded() as appliance:
    producer = Producer(appliance.address)
    producer.send("t", b"first").result(10)
    consumer = Consumer("t", bootstrap=appliance.address, auto_offset_reset="earliest")
    consumer.poll(1000)
    admin = Admin(appliance.address)
    admin.list_topics()
    over = threading.Event()
    def load():
        while not over.is_set():
            producer.send("t", b"more" * 25_000, headers=[("a", b"b")])   # large ones go to ZeroMQ without a copy
    thread = threading.Thread(target=load)
    thread.start()
    pid = os.fork()
    if pid == 0:
        try:
            appliance.stop()
        except ClientClosedError as error:
            inherited = "fork()" in str(error)
        del producer, consumer, admin
        gc.collect()
        sys.exit(5 if inherited else 6)   # as any program ends: blocks, atexit, destructors
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    over.set()
    thread.join()
    producer.flush(10)
    assert os.path.isdir(appliance.data_dir), "the child removed the data directory"
    assert producer.send("t", b"last").result(10).offset > 0
    assert consumer.poll(10_000)
    assert "t" in admin.list_topics()
    producer.close(); consumer.close(); admin.close()
assert not os.path.exists(appliance.data_dir)
"""


def test_a_child_that_ends_as_any_program_hangs_nowhere_and_takes_nothing_away() -> None:
    done = run_program(CHILD_THAT_ENDS_NORMALLY)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


# ---- the end -------------------------------------------------------------------------------------------------------------------------------

UNCLOSED = """
import sys
from tailrace import Producer
from tailrace.private_appliance import start_embedded
appliance = start_embedded(data_dir=sys.argv[1])
producer = Producer(appliance.address, linger_ms=60_000)
for number in range(100):
    producer.send("t", b"%d" % number)
"""


def test_what_an_unclosed_producer_holds_reaches_an_appliance_that_ends_with_the_program(tmp_path: pathlib.Path) -> None:
    done = run_program(UNCLOSED, str(tmp_path))
    assert done.returncode == 0, done.stderr
    running = start_embedded(data_dir=str(tmp_path))
    try:
        assert read_values(running, "t", 100) == [b"%d" % number for number in range(100)]
    finally:
        running.stop()


def test_flush_and_close_end_in_time_when_the_appliance_is_gone(topic: str) -> None:
    running = start_embedded()
    producer = Producer(running.address, linger_ms=60_000)
    errors: list[TailraceError | None] = []
    producer.send(topic, b"x").result(10)
    running.stop()
    handle = producer.send(topic, b"y", on_delivery=lambda _metadata, error: errors.append(error))
    refused: list[TailraceError] = []

    def send_to_unknown() -> None:
        try:
            producer.send("not-known-yet", b"z")
        except TailraceError as error:
            refused.append(error)

    blocked = threading.Thread(target=send_to_unknown)
    blocked.start()  # waits for metadata, for as long as max_block_ms
    with pytest.raises(RequestTimeoutError):
        producer.flush(0.2)
    closing = threading.Thread(target=producer.close, args=(0.2,))
    closing.start()
    closing.join(20)
    assert not closing.is_alive(), "close() waits for another thread's metadata"
    assert isinstance(handle.exception(0), ClientClosedError)
    assert [type(error) for error in errors] == [ClientClosedError]
    blocked.join(20)
    assert [type(error) for error in refused] == [ClientClosedError], "a send that waited for metadata ends with the producer"


UNCLOSED_WITHOUT_APPLIANCE = """
import sys
import tailrace.producer
tailrace.producer.EXIT_TIMEOUT_S = 0.5
from tailrace import Producer
from tailrace.private_appliance import start_embedded
appliance = start_embedded()
producers = [Producer(appliance.address, linger_ms=60_000) for _ in range(4)]
for producer in producers:
    producer.send("t", b"x").result(10)
appliance.stop()
for producer in producers:
    producer.send("t", b"y")
"""


def test_a_program_ends_in_time_with_unclosed_producers_and_no_appliance() -> None:
    done = run_program(UNCLOSED_WITHOUT_APPLIANCE, timeout_s=30)
    assert done.returncode == 0, done.stderr
