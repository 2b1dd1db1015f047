"""`send` from many threads, from collectors and handlers in the midst of `send`, and over a fork:
nothing lost, mixed, counted twice or waited for without end.

Run with the compiled kernel and with TAILRACE_PURE=1. The compiled one takes no lock while nobody
has it (`tailrace/kernel/native/locking.pxi`): here is what would go wrong if that were not as good.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tailrace import kernel
from tailrace.core.errors import ClientClosedError
from tailrace.kernel import reference
from tailrace.producer.batches.producer_batch import (
    BATCH_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    BatchState,
)
from tailrace.producer.producer import Producer
from tests.kit.peers.lone_producers import ignore, producer

HEADERS: list[Any] = [("h", bytearray(b"v"))]
"""They need thought."""


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*bodies: Callable[[], None]) -> None:
    """Each in a thread of its own; raises what one of them raised."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(bodies))

    def run(body: Callable[[], None]) -> None:
        begin.wait()
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def held(made: Producer) -> dict[int, list[Any]]:
    """The values of each batch, by its id. What is closed has as many rows as it was counted to
    have then, and each took the room that it takes, once.
    """
    for batch in made._sender_thread.accumulator.incomplete():
        rows = batch.rows
        assert batch.count == (0 if batch.state is BatchState.OPEN else len(rows))
        assert batch.room >= 0
        sizes = [
            len(key or b"") + len(value) + RECORD_OVERHEAD_BYTES
            for key, value in zip(rows.keys(), rows.values(), strict=True)
        ]
        sizes += [
            16 + len(h["key"]) + len(h["value"])
            for headers in rows.frame().column(3).to_pylist()
            for h in headers or ()
        ]
        assert batch.reserved_bytes - batch.room == BATCH_OVERHEAD_BYTES + sum(sizes)
    return {
        id(batch): batch.rows.values() for batch in made._sender_thread.accumulator.incomplete()
    }


@pytest.mark.usefixtures("hasty")
def test_batches_that_are_closed_while_threads_send_take_nothing_more_and_lose_nothing() -> None:
    each, threads = 1_500, 6
    with producer(buffer_memory=1 << 30, batch_size=4 << 20) as made:
        made._metadata.by_topic["t"].capacity_bytes = 4 << 20
        made.send("t", b"first", b"k")
        accumulator, lock = made._sender_thread.accumulator, made._sender_thread.lock
        handles: list[list[tuple[Any, int]]] = [[] for _ in range(threads)]

        def send(number: int) -> None:
            for i in range(each):
                handles[number].append(
                    made.send(
                        "t",
                        b"%d-%d" % (number, i) + bytes(3000),
                        b"k",
                        HEADERS if i % 7 == 0 else None,
                    )
                )
                if i % 50 == 0:
                    with lock:
                        accumulator.close_all()

        at_once(*(lambda number=number: send(number) for number in range(threads)))
        values = held(made)
        assert len(values) > 10, "closed again and again"
        assert sum(map(len, values.values())) == each * threads + 1
        assert accumulator.buffered_bytes == sum(
            batch.reserved_bytes for batch in accumulator.incomplete()
        )
        order = {id(batch): place for place, batch in enumerate(accumulator.incomplete())}
        for number, given_back in enumerate(handles):
            assert [values[id(batch)][row] for batch, row in given_back] == [
                b"%d-%d" % (number, i) + bytes(3000) for i in range(each)
            ]
            assert (places := [(order[id(batch)], row) for batch, row in given_back]) == sorted(
                places
            ), "the order of each thread's calls"


@pytest.mark.usefixtures("hasty")
def test_nothing_is_added_to_a_batch_while_another_thread_has_the_lock() -> None:
    with producer(buffer_memory=1 << 30, batch_size=4 << 20) as made:
        made._metadata.by_topic["t"].capacity_bytes = 4 << 20
        queue = made._metadata.by_topic["t"].queues[
            made.send("t", b"first", b"k").resolve()[0].partition
        ]
        done = threading.Event()

        def look() -> None:
            try:
                for _ in range(200):
                    with made._sender_thread.lock:
                        batch: Any = queue.open
                        before = len(batch.rows), batch.room
                        for _ in range(20_000):
                            pass
                        assert before == (len(batch.rows), batch.room)
            finally:
                done.set()

        def send() -> None:
            while not done.is_set():
                for _ in range(50):
                    made.send("t", b"v", b"k")

        at_once(look, send, send, send)


@pytest.mark.parametrize("callback", [None, ignore])
def test_a_send_waits_while_another_thread_has_the_lock(callback: Any) -> None:
    with producer() as made:
        made.send("t", b"first", b"k", on_delivery=callback)
        (batch,) = made._sender_thread.accumulator.incomplete()
        sender = threading.Thread(
            target=made.send, args=("t", b"second", b"k"), kwargs={"on_delivery": callback}
        )
        with made._sender_thread.lock:
            sender.start()
            sender.join(0.1)
            assert (len(batch.rows), sender.is_alive()) == (1, True)
        sender.join()
        assert batch.rows.values() == [b"first", b"second"]


def test_a_send_in_the_midst_of_a_send_of_the_same_thread_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal's handler, or an object's end, may send while this thread is within `send`."""
    with producer() as made:
        made.send("t", b"first", b"k")
        with made._sender_thread.lock:
            made.send("t", b"within", b"k")
        ((first, within),) = held(made).values()
        assert (first, within) == (b"first", b"within")


class Sends:
    """Garbage that sends once more when it is collected."""

    def __init__(self, made: Producer, given_back: list[Any]) -> None:
        self.me, self.made, self.given_back = self, made, given_back

    def __del__(self) -> None:
        self.given_back.append(self.made.send("t", b"from a collection", b"k"))


def test_what_the_collector_ends_may_send() -> None:
    threshold = gc.get_threshold()
    given_back: list[Any] = []
    sent = 3_000
    with producer(buffer_memory=1 << 30) as made:
        made.send("t", b"first", b"k")
        gc.set_threshold(3, 2, 2)
        try:
            for i in range(sent):
                Sends(made, given_back)
                # Also the way that is not quick, and one that opens batches.
                given_back.append(
                    made.send(
                        "t",
                        b"mine",
                        b"k",
                        HEADERS if i % 2 else None,
                        on_delivery=ignore if i % 3 else None,
                    )
                )
                if i % 100 == 0:
                    with made._sender_thread.lock:
                        made._sender_thread.accumulator.close_all()
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
        values = held(made)
        assert len(given_back) == 2 * sent
        found = [values[id(batch)][row] for batch, row in given_back]
        assert found.count(b"mine") == found.count(b"from a collection") == sent
        assert len({(id(batch), row) for batch, row in given_back}) == 2 * sent, "a row for each"


@pytest.mark.usefixtures("hasty")
def test_a_bytearray_that_another_thread_resizes_is_sent_as_it_was_at_one_time() -> None:
    with producer(buffer_memory=1 << 30) as made:
        changing, done = bytearray(b"a" * 100), threading.Event()
        views = memoryview(bytearray(b"a" * 64))

        def resize() -> None:
            while not done.is_set():
                changing[:] = b"b" * 3000
                views[:] = b"b" * 64
                changing[:] = b"a" * 100
                views[:] = b"a" * 64

        def send() -> None:
            try:
                for _ in range(2_000):
                    made.send("t", changing, views)
                    made.send("t", views, changing)
            finally:
                done.set()

        at_once(resize, send)
        for batch in made._sender_thread.accumulator.incomplete():
            assert set(batch.rows.values()) | set(batch.rows.keys()) <= {
                b"a" * 100,
                b"b" * 3000,
                b"a" * 64,
                b"b" * 64,
            }


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.usefixtures("hasty")
def test_a_fork_in_the_midst_of_sends_leaves_the_child_an_error_and_the_parent_everything(
    turn: int,
) -> None:
    each, threads = 2_000, 3
    with producer(buffer_memory=1 << 30) as made:
        made.send("t", b"first", b"k")
        statuses = []

        def send() -> None:
            for i in range(each):
                made.send("t", b"%d" % i, b"k", HEADERS if i % 4 == 0 else None)

        def fork() -> None:
            for _ in range(5):
                child = os.fork()
                if not child:
                    signal.alarm(20)  # a lock that is waited for in vain
                    status = 1
                    try:
                        made.send("t", b"v", b"k")
                    except ClientClosedError:
                        status = 0
                    finally:
                        os._exit(status)
                statuses.append(os.waitpid(child, 0)[1])

        at_once(fork, *[send] * threads)
        assert statuses == [0] * 5
        assert sum(map(len, held(made).values())) == each * threads + 1


def test_a_subclass_may_wrap_send_and_keep_things() -> None:
    class Counting(Producer):
        sent = 0

        def send(self, topic: str, value: Any = None, *args: Any, **more: Any) -> Any:
            self.sent += 1
            return super().send(topic, value, *args, **more)

    with producer() as made:
        made.__class__ = Counting
        for _ in range(3):
            made.send("t", b"v", b"k", partition=1, on_delivery=ignore)
        assert (made.sent, sum(map(len, held(made).values()))) == (3, 3)  # type: ignore[attr-defined]


def test_callbacks_of_quick_sends_are_called_with_their_records_fate_and_in_order() -> None:
    told: list[Any] = []
    with producer() as made:
        made.send("t", b"none", b"k")
        for number in range(5):
            made.send(
                "t",
                b"%d" % number,
                b"k",
                on_delivery=lambda metadata, error, number=number: told.append(  # type: ignore[misc]
                    (number, metadata.offset)
                ),
            )
            made.send("t", b"none", b"k")
        with made._sender_thread.lock:
            accumulator = made._sender_thread.accumulator
            (batch,) = accumulator.incomplete()
            queue = accumulator.queue_of_open(batch)
            assert queue is not None
            accumulator.close_batch(queue)
            batch.encode("none")
            accumulator.end(batch, 1000, None)
            queue.clear()
        made._sender_thread.make_callbacks()
        assert told == [(number, 1001 + 2 * number) for number in range(5)]


# ---- the lock ------------------------------------------------------------------------------------


@pytest.fixture(params=["kernel", "reference"])
def lock(request: pytest.FixtureRequest) -> Any:
    return (kernel if request.param == "kernel" else reference).new_lock()


def test_the_lock_is_reentrant_and_of_one_thread(lock: Any) -> None:
    taken: list[bool] = []

    def other() -> None:
        taken.append(lock.acquire(blocking=False))
        if taken[-1]:
            lock.release()

    with lock, lock:
        assert lock.acquire() is True
        lock.release()
        at_once(other)
        with pytest.raises(RuntimeError, match="un-acquired"):
            at_once(lock.release)
    at_once(other)
    assert taken == [False, True]
    with pytest.raises(RuntimeError, match="un-acquired"):
        lock.release()
    with pytest.raises(KeyError), lock:
        raise KeyError
    at_once(other)
    assert taken == [False, True, True]


@pytest.mark.usefixtures("hasty")
def test_one_thread_at_a_time_has_the_lock(lock: Any) -> None:
    within, most, count = [0], [0], [0]

    def body() -> None:
        for _ in range(400):
            with lock, lock:
                within[0] += 1
                most[0] = max(most[0], within[0])
                count[0] += 1
                within[0] -= 1

    at_once(*[body] * 5)
    assert (most, count) == ([1], [2000])


def test_a_lock_that_a_thread_of_the_parent_had_is_free_in_a_child(lock: Any) -> None:
    has, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has.set()
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    has.wait()
    lock._at_fork_reinit()
    with lock, lock:
        pass
    assert lock.acquire(blocking=False)
    lock.release()
    leave.set()
    threading.excepthook, before = (
        lambda _: None,
        threading.excepthook,
    )  # it cannot let go what it does not have any more
    holder.join()
    threading.excepthook = before


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals come to the main thread",
)
def test_who_waits_for_the_lock_is_interrupted_by_a_signals_handler_that_raises(lock: Any) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(_number: int, _frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    has, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has.set()
            while not leave.wait(0.01):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def wait() -> None:
        holder.start()
        has.wait()
        lock.acquire()

    holder = threading.Thread(target=hold)
    try:
        with pytest.raises(Interrupted):
            wait()
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        leave.set()
        holder.join()
        signal.signal(signal.SIGUSR1, before)
    with lock:
        pass


def test_where_a_library_has_put_its_own_lock_in_the_place_of_pythons_that_one_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gevent's threads are not the system's: a lock of the system's would be that of all of
    them.
    """
    monkeypatch.setattr(threading, "RLock", threading._PyRLock)  # type: ignore[attr-defined]
    assert type(kernel.new_lock()).__module__ == "threading"
    with producer() as made:
        assert type(made._sender_thread.lock).__module__ == "threading"
        for number in range(4):
            made.send("t", b"%d" % number, b"k", on_delivery=ignore if number % 2 else None)
        assert list(held(made).values()) == [[b"0", b"1", b"2", b"3"]]
