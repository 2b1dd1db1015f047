"""`send` for records that need no thought does exactly what it does for those that do: the same
records, the same errors.

Run with the compiled kernel and with TAILRACE_PURE=1: each decides for itself what needs no
thought.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from time import time_ns
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.client.records.partitioners import DefaultPartitioner
from tailrace.core.errors import TailraceError
from tailrace.producer.producer import Producer
from tests.kit.peers.lone_producers import PARTITIONS, ignore, producer

LONG_WAY: Any = Producer.send.__wrapped__  # type: ignore[attr-defined]


class Bytes(bytes):
    pass


class Text(str):
    pass


class Number(int):
    pass


PART = (
    st.none() | st.binary(max_size=30)
    | st.sampled_from([b"k1", b"k2", "k1", "\u00e9t\u00e9", "\ud800", Bytes(b"k1"), Text("k2"), 7,
    2.5, ["k"], b"x" * 70_000])
    | st.binary(max_size=9).map(bytearray) | st.binary(max_size=9).map(memoryview) | st.just(memoryview(b"abcdef")[::2])  # noqa: E501
)  # fmt: skip
PAIR = st.tuples(
    st.sampled_from(["a", "trace", "\u00e9", "", Text("t"), "\ud800", b"bytes", None]),
    st.none()
    | st.binary(max_size=5)
    | st.sampled_from([bytearray(b"ab"), memoryview(b"cd"), Bytes(b"ef"), "text", 3]),
)
HEADERS = (
    st.none() | st.lists(PAIR, max_size=3) | st.lists(PAIR, max_size=2).map(tuple)
    | st.sampled_from([[], (), {}, 5, "ab", [("a",)], [["a", b"list"]], [("a", b"b", b"c")],
    [None]])
)  # fmt: skip
PARTITION = (
    st.none() | st.integers(-1, PARTITIONS) | st.sampled_from([True, Number(1), 1.0, "1", 2**70])
)
TIMESTAMP = st.none() | st.integers(-5, 5) | st.sampled_from(
    [0, 2**63 // 1000 - 1, -(2**63 // 1000), 2**63, 2**80, True, Number(9), 1.5, "now",
    datetime(2026, 1, 2, 3, 4, 5, 6), datetime(1960, 1, 1, tzinfo=UTC)]
)  # fmt: skip
TOPIC = st.sampled_from(["t", "t", "t", "t", Text("t"), "other", ["t"], 3])
CALLBACK = st.none() | st.sampled_from([ignore, 7, "", "callback"])
COMMON = st.tuples(
    st.just("t"),
    st.binary(max_size=50),
    st.none() | st.binary(max_size=9),
    st.none(),
    st.none(),
    st.none(),
    st.none() | st.just(print),
)
ANY = st.tuples(TOPIC, PART, PART, HEADERS, PARTITION, TIMESTAMP, CALLBACK)


def outcome(send: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        handle = send(*arguments[:6], on_delivery=arguments[6])
    except TailraceError as error:
        return type(error), str(error)
    batch, row = handle.resolve()
    return batch.partition, row


def batches(made: Producer) -> list[tuple[Any, ...]]:
    """Batches of the producer, by partition, timestamps that were not given left out."""
    held = []
    for queue in made._sender_thread.accumulator.queues.values():
        for batch in queue.batches():
            rows = batch.rows
            stamps = [
                stamp if abs(stamp - time_ns() // 1000) > 10**9 else "now"
                for stamp in rows.stamps_us()
            ]
            headers = rows.frame().column(3).to_pylist() if rows else []
            held.append(
                (
                    batch.callbacks,
                    batch.partition,
                    batch.state,
                    rows.keys(),
                    rows.values(),
                    stamps,
                    headers,
                    batch.room,
                    batch.reserved_bytes,
                )
            )
    return held


@pytest.mark.parametrize("partitioner", [None, "consistent_random", "sticky", "modulo"])
def test_quick_or_not_a_send_has_one_outcome(partitioner: str | None) -> None:
    settings = {} if partitioner is None else {"partitioner": partitioner}

    plain = ("t", b"", None, None, None)  # the first record opens the batch, the others are quick

    @example([(*plain, None, None), (*plain, -1, None), (*plain, 0, None)])
    @given(st.lists(COMMON | ANY, min_size=1, max_size=12))
    def sent_both_ways(sends: list[tuple[Any, ...]]) -> None:
        with producer(**settings) as quick, producer(**settings) as slow:
            for made in (quick, slow):
                if isinstance(made._records.partitioner, DefaultPartitioner):
                    made._records.partitioner._sticky["t"] = 1
            for arguments in sends:
                assert outcome(quick.send, arguments) == outcome(partial(LONG_WAY, slow), arguments)
            assert batches(quick) == batches(slow)
            assert quick.metrics() == slow.metrics()

    sent_both_ways()


def test_what_is_changed_after_send_was_copied() -> None:
    with producer() as made:
        key, value, content = bytearray(b"key"), bytearray(b"value"), bytearray(b"content")
        views = memoryview(bytearray(b"value"))
        headers: list[Any] = [("name", content)]
        for _ in range(3):
            made.send("t", value, key, headers, 0)
        plain = [("name", b"content")]
        made.send("t", value, b"key", plain, 0)
        made.send("t", views, b"key", plain, 0)
        views[:] = b"VALUE"
        key[:], value[:], content[:] = b"KEY", b"VALUE", b"CONTENT"
        headers.clear()
        plain[0] = ("other", b"")
        (batch,) = made._sender_thread.accumulator.incomplete()
        rows = batch.rows.frame().to_pylist()
        assert [(row["key"], row["value"], row["headers"]) for row in rows] == [
            (b"key", b"value", [{"key": "name", "value": b"content"}])
        ] * 5


def test_threads_that_send_at_once_lose_and_mix_nothing() -> None:
    each, threads = 4_000, 6
    with producer(batch_size=50_000, buffer_memory=1 << 30) as made:
        begin = threading.Barrier(threads)
        handles: dict[int, list[tuple[Any, int]]] = {}

        def send(number: int) -> None:
            begin.wait()
            handles[number] = [
                made.send(
                    "t",
                    b"%d-%d" % (number, i),
                    b"%d" % (i % 7),
                    [("n", b"%d" % i)] if i % 3 == 0 else None,
                )
                for i in range(each)
            ]

        running = [threading.Thread(target=send, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        values = {
            id(batch): batch.rows.values() for batch in made._sender_thread.accumulator.incomplete()
        }
        assert sum(map(len, values.values())) == each * threads
        for number, given_back in handles.items():
            assert [values[id(batch)][row] for batch, row in given_back] == [
                b"%d-%d" % (number, i) for i in range(each)
            ]


def test_a_closed_producer_takes_nothing() -> None:
    with producer() as made:
        made.send("t", b"v", b"k")
        made._sender_thread.stop()
        for arguments in (("t", b"v", b"k"), ("t", b"v", b"k", None, 0), ("t", b"v")):
            with pytest.raises(TailraceError, match="closed"):
                made.send(*arguments)


def test_help_and_signature_are_those_of_send() -> None:
    import inspect

    names = list(inspect.signature(Producer.send).parameters)
    assert names[:7] == ["self", "topic", "value", "key", "headers", "partition", "timestamp"]
    assert "Add one record to its partition's batch" in (inspect.getdoc(Producer.send) or "")
    with producer() as made, pytest.raises(TypeError, match="unexpected keyword argument"):
        made.send("t", b"v", colour="red")  # type: ignore[call-arg]
