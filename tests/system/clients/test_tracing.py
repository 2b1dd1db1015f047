"""Traces through a real appliance: the context of each send arrives with its record, over retries,
dead letters, delays and queues, and every span ends.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tailrace import (
    Admin,
    Consumer,
    InvalidSettingError,
    NewTopic,
    PartitionOutOfRangeError,
    Producer,
    Record,
    ShareConsumer,
    UnknownTopicError,
)
from tailrace.aio import AsyncConsumer, AsyncProducer, AsyncShareConsumer
from tailrace.core.errors import InvalidRecordError
from tailrace.core.topic_names import dead_letter_name
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.members.queues import make, read

LONG_MS = 60_000


class Recorded:
    """A program's tracer provider, and the spans that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Any = self.provider.get_tracer("program")

    def spans(self, operation: str) -> list[ReadableSpan]:
        """The ended spans of an operation, in the order in which they were started."""
        found = [
            span
            for span in self._exporter.get_finished_spans()
            if (span.attributes or {}).get("messaging.operation.name") == operation
        ]
        return sorted(found, key=lambda span: span.start_time or 0)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def traceparents(record: Record) -> list[str]:
    return [value.decode() for name, value in record.headers if name == "traceparent"]


def traceparent(span: ReadableSpan) -> str:
    context: Any = span.context
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def id_of(span: ReadableSpan) -> int:
    return span.context.span_id  # type: ignore[no-any-return]


def trace_of(span: ReadableSpan) -> int:
    return span.context.trace_id  # type: ignore[no-any-return]


def test_a_record_is_traced_from_send_over_its_retries_to_the_dead_letter(
    appliance: EmbeddedAppliance, topic: str, recorded: Recorded
) -> None:
    make(appliance, topic)
    with (
        Producer(appliance.address, tracing=recorded.provider) as producer,
        recorded.tracer.start_as_current_span("order"),
    ):
        producer.send(topic, b"poison", key=b"k", headers=[("h", b"x")])
        producer.flush()
    (send,) = recorded.spans("send")
    assert (send.name, send.kind) == (f"send {topic}", SpanKind.PRODUCER)
    attributes: Any = send.attributes
    assert attributes["messaging.system"] == "tailrace"
    assert attributes["messaging.operation.type"] == "send"
    assert attributes["messaging.destination.name"] == topic
    assert attributes["messaging.destination.partition.id"] == "0"
    assert attributes["messaging.tailrace.offset"] == 0
    assert attributes["server.address"] in appliance.address

    attempts = []
    with Consumer(
        topic,
        bootstrap=appliance.address,
        group_id="billing",
        auto_offset_reset="earliest",
        max_retry_attempts=1,
        tracing=recorded.provider,
    ) as consumer:
        for record in consumer:
            (header,) = traceparents(record)
            current = trace.get_current_span().get_span_context()
            attempts.append((header, current.span_id))
            assert dict(record.headers)["h"] == b"x"
            if not consumer.retry_later(record, timedelta(0)):
                break
        assert not trace.get_current_span().get_span_context().is_valid
        consumer.commit()
    first, second = recorded.spans("process")
    sends = recorded.spans("send")
    assert [span.attributes["messaging.destination.name"] for span in sends] == [
        topic,
        f"{topic}.billing.retry",
        dead_letter_name(topic),
    ]
    assert [header for header, _ in attempts] == [traceparent(span) for span in sends[:2]]
    assert [span_id for _, span_id in attempts] == [id_of(first), id_of(second)]
    # One trace: send, its processing, the retry in it, that one's processing, the dead letter.
    steps = [sends[0], first, sends[1], second, sends[2]]
    for before, after in pairwise(steps):
        assert trace_of(before) == trace_of(after)
        assert after.parent is not None
        assert after.parent.span_id == id_of(before)
    assert linked(first) == [id_of(sends[0])]
    assert (first.kind, first.attributes["messaging.consumer.group.name"]) == (
        SpanKind.CONSUMER,
        "billing",
    )
    assert {span.status.status_code for span in steps} == {StatusCode.UNSET}
    (letter,) = read(appliance, dead_letter_name(topic), 1)
    assert traceparents(letter) == [traceparent(sends[2])]
    assert dict(letter.headers)["dlq.topic"] == topic.encode()
    (settle,) = recorded.spans("settle")
    assert settle.kind is SpanKind.CLIENT


def test_a_poll_has_one_span_with_links_to_the_sends_of_its_records(
    appliance: EmbeddedAppliance, topic: str, recorded: Recorded
) -> None:
    make(appliance, topic)
    with Producer(appliance.address, tracing=recorded.tracer) as producer:
        for number in range(3):
            producer.send(topic, b"%d" % number)
    with Consumer(
        topic, bootstrap=appliance.address, auto_offset_reset="earliest", tracing=recorded.provider
    ) as consumer:
        assert [record.value for record in consumer.consume(3, 60)] == [b"0", b"1", b"2"]
        assert consumer.poll(0) == []  # without a record there is no span
    (receive,) = recorded.spans("receive")
    assert (receive.name, receive.kind) == (f"receive {topic}", SpanKind.CLIENT)
    assert linked(receive) == [id_of(span) for span in recorded.spans("send")]
    assert receive.attributes is not None
    assert receive.attributes["messaging.batch.message_count"] == 3
    assert receive.attributes["messaging.destination.partition.id"] == "0"
    with Consumer(
        topic, bootstrap=appliance.address, auto_offset_reset="earliest", tracing=recorded.provider
    ) as consumer:
        assert consumer.poll_arrow(LONG_MS)
    assert len(recorded.spans("receive")) == 2


def test_a_delayed_record_and_a_frame_are_traced(
    appliance: EmbeddedAppliance, topic: str, recorded: Recorded
) -> None:
    make(appliance, topic, delay_enabled=True)
    typed = f"{topic}-typed"
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(typed, schema=pa.schema([("number", pa.int64())])))
    with Producer(appliance.address, tracing=recorded.provider) as producer:
        later = producer.send(topic, b"later", deliver_after=timedelta(milliseconds=1))
        delay_id = later.result(60).delay_id
        producer.send_arrow(typed, pa.table({"number": [1, 2]})).result(60)
        context = [("traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01")]
        producer.send(typed, {"number": 3}, headers=context).result(60)  # a row has no headers
        with pytest.raises(InvalidRecordError, match="no headers"):
            producer.send(typed, {"number": 4}, headers=[*context, ("own", b"1")])
    delayed, frame, row, refused = recorded.spans("send")
    assert delayed.attributes is not None
    assert delayed.attributes["messaging.tailrace.delay_id"] == delay_id
    (record,) = read(appliance, topic, 1)
    assert traceparents(record) == [traceparent(delayed)]
    assert frame.attributes is not None
    assert frame.attributes["messaging.batch.message_count"] == 2
    assert row.status.status_code is StatusCode.UNSET
    assert refused.status.status_code is StatusCode.ERROR
    assert [record.value["number"] for record in read(appliance, typed, 3)] == [1, 2, 3]


def test_a_queue_continues_the_trace_to_the_dead_letter_of_a_rejected_record(
    appliance: EmbeddedAppliance, topic: str, recorded: Recorded
) -> None:
    make(appliance, topic)
    with Producer(appliance.address, tracing=recorded.provider) as producer:
        producer.send(topic, b"poison")
    with ShareConsumer(
        topic,
        bootstrap=appliance.address,
        group_id=f"g-{topic}",
        auto_offset_reset="earliest",
        tracing=recorded.provider,
    ) as consumer:
        for record in consumer:
            consumer.acknowledge(record, "reject")
            break
        consumer.commit()
    send, letter = recorded.spans("send")
    (process,) = recorded.spans("process")
    assert process.attributes is not None
    assert process.attributes["messaging.tailrace.delivery_count"] == 1
    assert process.status.status_code is StatusCode.UNSET
    assert trace_of(send) == trace_of(process) == trace_of(letter)
    assert linked(letter) in ([], [id_of(send)])
    assert recorded.spans("settle")
    (dead,) = read(appliance, dead_letter_name(topic), 1)
    assert traceparents(dead) == [traceparent(letter)]


def test_a_loop_that_an_exception_leaves_fails_its_span_and_one_that_breaks_does_not(
    appliance: EmbeddedAppliance, topic: str, recorded: Recorded
) -> None:
    make(appliance, topic, 2)

    def process(*, raises: bool) -> None:
        with Consumer(
            topic,
            bootstrap=appliance.address,
            auto_offset_reset="earliest",
            tracing=recorded.tracer,
        ) as consumer:
            for _ in consumer:
                if raises:
                    raise ArithmeticError
                break

    process(raises=False)
    with pytest.raises(ArithmeticError):
        process(raises=True)
    assert [span.status.status_code for span in recorded.spans("process")] == [
        StatusCode.UNSET,
        StatusCode.ERROR,
    ]
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_send_that_is_refused_ends_its_span_with_the_error(
    appliance: EmbeddedAppliance, topic: str, recorded: Recorded
) -> None:
    make(appliance, topic)
    with Producer(appliance.address, tracing=recorded.provider) as producer:
        with pytest.raises(UnknownTopicError):  # found while it waits for the metadata
            producer.send(f"{topic}-none", b"x")
        producer.partitions_for(topic)
        with pytest.raises(PartitionOutOfRangeError):  # found at once
            producer.send(topic, b"x", partition=9)
    refused = recorded.spans("send")
    assert [span.status.status_code for span in refused] == [StatusCode.ERROR] * 2
    assert refused[1].attributes is not None
    assert refused[1].attributes["error.type"] == "PartitionOutOfRangeError"


def test_headers_that_were_read_are_sent_on_with_the_new_context_in_the_place_of_the_old(
    appliance: EmbeddedAppliance, topic: str, recorded: Recorded
) -> None:
    make(appliance, topic)
    old = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers: Any = iter([("a", b"1"), ("traceparent", old.encode()), ("b", b"2")])
    with Producer(appliance.address, tracing=recorded.provider) as producer:
        producer.send(topic, b"x", headers=headers)
    (send,) = recorded.spans("send")
    (record,) = read(appliance, topic, 1)
    assert record.headers == [
        ("traceparent", traceparent(send).encode()),
        ("a", b"1"),
        ("b", b"2"),
    ]
    # Without a current span the trace of the headers goes on.
    assert f"{trace_of(send):032x}" in old


def test_clients_of_an_event_loop_trace_as_the_others_do(
    appliance: EmbeddedAppliance, topic: str, recorded: Recorded
) -> None:
    make(appliance, topic)

    async def body() -> None:
        async with AsyncProducer(appliance.address, tracing=recorded.provider) as producer:
            with recorded.tracer.start_as_current_span("order"):
                await producer.send_and_wait(topic, b"0")
            await asyncio.gather(
                *(producer.send_and_wait(topic, b"%d" % number) for number in range(1, 4))
            )
        async with AsyncConsumer(
            topic,
            bootstrap=appliance.address,
            group_id=f"c-{topic}",
            auto_offset_reset="earliest",
            tracing=recorded.provider,
        ) as consumer:
            async for record in consumer:
                inner = trace.get_current_span()
                assert f"{inner.get_span_context().trace_id:032x}" in traceparents(record)[0]
                assert await consumer.retry_later(record, 0) == 1
                break
            assert not trace.get_current_span().get_span_context().is_valid
            await consumer.getone()
            assert await consumer.poll(LONG_MS)
            await consumer.commit()
        async with AsyncShareConsumer(
            topic,
            bootstrap=appliance.address,
            group_id=f"q-{topic}",
            auto_offset_reset="earliest",
            tracing=recorded.provider,
        ) as queue:
            async for _ in queue:
                break
            assert await queue.poll(LONG_MS)

    asyncio.run(body(), debug=True)
    sends = recorded.spans("send")
    first, queued = recorded.spans("process")
    (retry,) = (span for span in sends if span.name.endswith(".retry"))
    assert linked(first) == linked(queued) == [id_of(sends[0])]
    assert retry.parent is not None
    assert retry.parent.span_id == id_of(first)
    assert [span.status.status_code for span in (first, queued)] == [StatusCode.UNSET] * 2
    assert len(recorded.spans("receive")) == 3


def test_without_the_setting_nothing_of_opentelemetry_is_imported_and_a_wrong_one_is_named(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    program = (
        "import sys, tailrace\n"
        f"with tailrace.Producer({appliance.address!r}) as producer:\n"
        f"    producer.send({topic!r}, b'x').result(60)\n"
        f"with tailrace.Consumer({topic!r}, bootstrap={appliance.address!r}, group_id='g',"
        " auto_offset_reset='earliest') as consumer:\n"
        "    next(iter(consumer))\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    with pytest.raises(InvalidSettingError, match="tracing is 'yes'"):
        Producer(appliance.address, tracing="yes")


def test_a_program_without_opentelemetry_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "tailrace.client.tracing.spans", raising=False)
    monkeypatch.delitem(sys.modules, "tailrace.client.tracing.header_context", raising=False)
    with pytest.raises(InvalidSettingError, match=r"pip install 'tailrace\[otel\]'"):
        Consumer(tracing=True)
