"""Clients that attack delayed delivery: whatever they send, the records of others are delivered in
their time, and no process ends.
"""

from __future__ import annotations

import base64
import datetime as dt
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, Recurrence
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_now
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import RecordTooLargeError, TailraceError, UnsafeBatchError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.format.record_batch.arrow_metadata import ArrowMetadataError, read_schema
from tailrace.format.record_batch.batch_header import BatchHeader, checksum_seed
from tailrace.format.schema import delay_schema, to_message
from tailrace.kernel.reference_arrow import default_rows
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import Api
from tests.kit.peers.produce_call import produce
from tests.kit.processes import HANG_LIMIT_S, wait_until

HOUR = dt.timedelta(hours=1)


def now_us() -> int:
    return int(dt.datetime.now(dt.UTC).timestamp() * 1e6)


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 1, {"delay.enabled": True})])
    return topic


@pytest.fixture(autouse=True)
def others_are_served(appliance: EmbeddedAppliance) -> Iterator[None]:
    """After each of these: a record of somebody else is delivered when it is due, and no process
    was restarted.
    """
    yield
    name = f"other-{os.urandom(4).hex()}"
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name, 1, {"delay.enabled": True})])
        check_delivered(appliance, name)
        processes = admin.describe_cluster()["processes"]
        assert all(process["restarts"] == 0 for process in processes)


def check_delivered(appliance: EmbeddedAppliance, name: str) -> None:
    """A record that is delayed now is delivered."""
    marker = os.urandom(6).hex().encode()
    with (
        Producer(appliance.address) as producer,
        Consumer(name, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer,
    ):
        producer.send(name, marker, deliver_after=dt.timedelta(milliseconds=20)).result(60)
        seen: list[object] = []
        while marker not in seen:
            some = consumer.poll(timeout_ms=60_000)
            assert some, f"it did not come; {len(seen)} others did"
            seen += [record.value for record in some]


def info_of(appliance: EmbeddedAppliance, name: str) -> TopicInfo:
    with Admin(appliance.address) as admin:
        found = admin.topic_info([name])[name].delay_log
    assert found is not None
    return found


def put(
    appliance: EmbeddedAppliance,
    info: TopicInfo,
    rows: pa.RecordBatch,
    codec: str = "none",
    **fields: int,
) -> TailraceError | None:
    """Rows straight into a delay log; answers why not."""
    header = BatchHeader(
        record_count=rows.num_rows, last_offset_delta=rows.num_rows - 1, schema_id=info.schema_id
    )
    for name, value in fields.items():
        setattr(header, name, value)
    batch = arrow_batch.encode_as(rows, header, info.seeds[0], codec)
    connection = Connection(appliance.address, "raw")
    try:
        produce(connection, info.topic_id, batch, timeout_ms=5_000)
        return None
    except TailraceError as error:
        return error
    finally:
        connection.close()


def call(appliance: EmbeddedAppliance, api: Api, body: list[Any]) -> TailraceError | None:
    connection = Connection(appliance.address, "hostile")
    try:
        call_now(connection, api, body, 20_000)
    except TailraceError as error:
        return error
    finally:
        connection.close()
    return None


def rows_of(count: int, value: bytes = b"hostile") -> pa.RecordBatch:
    return default_rows([1] * count, [b"k"] * count, [value] * count, None)


def lost_rows(appliance: EmbeddedAppliance, name: str) -> int:
    with Admin(appliance.address) as admin:
        return sum(each["lost_rows"] for each in admin.describe_delays() if each["topic"] == name)


def test_requests_of_odd_shapes_are_answered(appliance: EmbeddedAppliance, made: str) -> None:
    odd: list[Any] = [
        {},
        [],
        [[]],
        1 << 63,
        -(1 << 63),
        1.5,
        True,
        "x" * 500,
        [1, 2],
        [{}, {}, {}],
        [1 << 63] * 3,
        [-1, -1, -1],
    ]
    bodies: list[tuple[Api, Any]] = [
        (Api.LIST_DELAYS, {"topic": made, name: value})
        for name in ("after", "limit", "key", "from_us")
        for value in odd
    ]
    bodies += [(Api.LIST_DELAYS, {"topic": value}) for value in odd] + [
        (Api.DESCRIBE_DELAYS, {"after": value}) for value in odd
    ]
    bodies += [(Api.CHANGE_DELAYS, {"changes": value}) for value in odd] + [
        (Api.CHANGE_DELAYS, {"changes": [value]}) for value in odd
    ]
    bodies += [
        (Api.CHANGE_DELAYS, {"changes": [{"delay_id": value, "due_us": value}]}) for value in odd
    ]
    connection = Connection(appliance.address, "hostile")
    refused = []
    for api, body in bodies:
        try:
            call_now(connection, api, [orjson.dumps(body)], 20_000)
        except TailraceError as error:
            refused.append(error.code.name)
    connection.close()
    assert len(refused) > len(bodies) // 2
    assert set(refused) <= {"INVALID_REQUEST", "MALFORMED_REQUEST", "UNKNOWN_TOPIC"}


def test_a_thousand_long_keys_are_listed(appliance: EmbeddedAppliance, made: str) -> None:
    keys = {b"%03d" % number + b"k" * 697 for number in range(1_000)}
    with Producer(appliance.address) as producer, Admin(appliance.address) as admin:
        for key in keys:
            producer.send(made, b"", key, deliver_after=HOUR)
        producer.flush(HANG_LIMIT_S)
        assert {delay.key for delay in admin.list_delays(made)} == keys


def test_a_record_too_large_to_be_delivered_is_refused_by_its_producer(
    appliance: EmbeddedAppliance, made: str
) -> None:
    with Producer(appliance.address, compression_type="zstd") as producer:
        for size in (5_000_000, 1_500_000):
            frame = pa.table({"value": pa.array([b"a" * size])})
            with pytest.raises(RecordTooLargeError):
                producer.send_arrow(made, frame, deliver_after=dt.timedelta(seconds=1)).result(60)
        small = [b"b" * 300_000] * 8
        sent = producer.send_arrow(
            made, pa.table({"value": pa.array(small)}), deliver_after=dt.timedelta(seconds=1)
        ).result(60)
        assert sum(len(metadata.delay_ids) for metadata in sent) == 8
    with Consumer(made, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        count = 0
        while count < 8:
            some = consumer.poll(timeout_ms=60_000)
            assert some
            count += len(some)
    check_delivered(appliance, made)


@pytest.mark.parametrize("size", [5_000_000, 1_500_000])
def test_a_raw_batch_that_unpacks_to_more_than_can_be_delivered_keeps_nobody_waiting(
    appliance: EmbeddedAppliance, made: str, size: int
) -> None:
    large = arrow_batch.with_delays(
        rows_of(1, b"a" * size), info_of(appliance, made).schema, [now_us()], None
    )
    refused = put(appliance, info_of(appliance, made), large, "zstd")
    check_delivered(appliance, made)
    if refused is None and size == 5_000_000:
        assert lost_rows(appliance, made) == 1
    elif refused is not None:
        assert isinstance(refused, RecordTooLargeError)


def test_batches_and_rows_that_nobody_expects_keep_nobody_waiting(
    appliance: EmbeddedAppliance, made: str
) -> None:
    info = info_of(appliance, made)
    rows = arrow_batch.with_delays(rows_of(2), info.schema, [now_us()] * 2, None)
    put(appliance, info, rows, attributes=8, last_offset_delta=9)
    odd_dues = [-(1 << 63), (1 << 63) - 1]
    put(appliance, info, arrow_batch.with_delays(rows_of(2), info.schema, odd_dues, None))
    for text in (
        "",
        "{",
        '{"every_us": []}',
        "[" * 900,
        '{"every_us": 10000, "missed": "last"}',
        '{"expression": "* * * * * *", "zone": []}',
    ):
        put(
            appliance,
            info,
            arrow_batch.with_delays(rows_of(2), info.schema, odd_dues, [text, text]),
        )
    many = arrow_batch.with_delays(rows_of(1, b""), info.schema, np.full(1, now_us()), None)
    put(appliance, info, many.take(pa.array(np.zeros(200_000, np.int64))), "zstd")
    check_delivered(appliance, made)
    assert lost_rows(appliance, made) > 0
    with Admin(appliance.address) as admin:
        assert all(delay.due.year < 2300 for delay in admin.list_delays(made)), (
            "others can list what a client has put there"
        )


def test_one_client_cannot_cancel_or_move_anothers_record(
    appliance: EmbeddedAppliance, made: str
) -> None:
    info = info_of(appliance, made)
    with Producer(appliance.address) as producer, Admin(appliance.address) as admin:
        victim = producer.send(made, b"victim", deliver_after=HOUR).result(60)
        assert victim.delay_id is not None
        for due in (None, now_us()):
            plain = rows_of(3).columns
            rows = [
                *plain,
                pa.array([due] * 3, pa.int64()),
                pa.array([0, 1, 2], pa.int64()),
                pa.nulls(3, pa.utf8()),
            ]
            put(appliance, info, pa.RecordBatch.from_arrays(rows, schema=info.schema))
        check_delivered(appliance, made)
        assert victim.delay_id in {delay.delay_id for delay in admin.list_delays(made)}
        moved = admin.reschedule_delays({victim.delay_id: dt.datetime.now(dt.UTC)})[victim.delay_id]
        assert isinstance(moved, str)


def test_a_batch_that_claims_to_be_the_schedulers_is_refused(
    appliance: EmbeddedAppliance, made: str
) -> None:
    info = info_of(appliance, made)
    rows = arrow_batch.with_delays(rows_of(3), info.schema, [now_us()] * 3, None)
    for token in (1, 1 << 32 | 1, 1 << 61):
        assert isinstance(put(appliance, info, rows, due_us=token), UnsafeBatchError)
    assert isinstance(put(appliance, info, rows, attributes=4), UnsafeBatchError)


def _as_it_is(message: bytes) -> bytes:
    return message


def _with_no_text_as_zone(message: bytes) -> bytes:
    return message.replace(b"Zzzz", b"\xff\xfe\xff\xfe")


def _with_seven_bits(message: bytes) -> bytes:
    """The first column's integers have as many."""
    for at in range(0, len(message) - 3, 4):
        bent = message[:at] + struct.pack("<i", 7) + message[at + 4 :]
        try:
            read_schema(bent)
        except ArrowMetadataError as error:
            if struct.unpack_from("<i", message, at)[0] == 8 and "width in bits 7" in str(error):
                return bent
    raise AssertionError("there is no such place")


def _schemas() -> list[Any]:
    """A topic's schema, its delay log's, and what becomes of their messages."""
    zone, no_text = (
        pa.schema([("t", pa.timestamp("us", "5"))]),
        pa.schema([("t", pa.timestamp("us", "Zzzz"))]),
    )
    twice = pa.schema([("n", pa.int64()), ("n", pa.int64())])
    inner, number, small = (
        pa.schema([("@due_us", pa.int64())]),
        pa.schema([("n", pa.int64())]),
        pa.schema([("n", pa.int8())]),
    )
    both = pa.schema([*inner, *list(delay_schema(number))[1:]])
    as_float = pa.schema([pa.field("n", pa.float64()), *list(delay_schema(number))[1:]])
    due_float = pa.schema(
        [
            ("n", pa.int64()),
            ("@due_us", pa.float64()),
            ("@origin", pa.int64()),
            ("@repeat", pa.utf8()),
        ]
    )
    return [
        pytest.param(zone, delay_schema(zone), _as_it_is, id="a zone that is a number"),
        pytest.param(
            no_text, delay_schema(no_text), _with_no_text_as_zone, id="a zone that is no text"
        ),
        pytest.param(twice, delay_schema(twice), _as_it_is, id="a column of a name twice"),
        pytest.param(inner, both, _as_it_is, id="a column named as one of ours"),
        pytest.param(small, delay_schema(small), _with_seven_bits, id="seven bits"),
        pytest.param(number, as_float, _as_it_is, id="another type"),
        pytest.param(number, due_float, _as_it_is, id="due times of another type"),
    ]


@pytest.mark.parametrize(("schema", "delayed", "bent"), _schemas())
def test_schemas_that_nobody_expects_keep_nobody_waiting(
    appliance: EmbeddedAppliance,
    topic: str,
    made: str,
    schema: pa.Schema,
    delayed: pa.Schema,
    bent: Callable[[bytes], bytes],
) -> None:
    name = f"{topic}-odd"
    entry = {
        "name": name, "partitions": 1, "configs": {"delay.enabled": "true"},
        "schema": base64.b64encode(bent(to_message(schema))).decode(),
        "delay_schema": base64.b64encode(bent(to_message(delayed))).decode(),
    }  # fmt: skip
    connection = Connection(appliance.address, "hostile")
    try:
        answer = requests.decode_json(
            call_now(
                connection, Api.CREATE_TOPICS, [orjson.dumps({"topics": [entry]})], 20_000
            ).body[0]
        )
        if answer["results"][0]["code"]:
            return  # refused: better still
        described = requests.decode_json(
            call_now(connection, Api.METADATA, [orjson.dumps({"topics": [name]})], 20_000).body[0]
        )
        (log,) = [each["delay_log"] for each in described["topics"]]
        values = [now_us() if field.name == "@due_us" else 1 for field in delayed][:-2]
        columns = [
            pa.array([value]).cast(field.type, safe=False)
            for value, field in zip(values, delayed, strict=False)
        ]
        columns += [pa.nulls(1, field.type) for field in list(delayed)[-2:]]
        header = BatchHeader(record_count=1, schema_id=log["schema_id"])
        topic_id = bytes.fromhex(log["topic_id"])
        batch = arrow_batch.encode_as(
            pa.RecordBatch.from_arrays(columns, schema=delayed),
            header,
            checksum_seed(topic_id, 0),
            "none",
        )
        produce(connection, topic_id, batch, timeout_ms=5_000)
    finally:
        connection.close()
    check_delivered(appliance, made)


def test_recurrences_without_end_keep_nobody_waiting(
    appliance: EmbeddedAppliance, made: str
) -> None:
    info = info_of(appliance, made)
    text = Recurrence(every_us=10_000).to_json()
    put(appliance, info, arrow_batch.with_delays(rows_of(20), info.schema, [0] * 20, [text] * 20))
    check_delivered(appliance, made)
    with Admin(appliance.address) as admin:
        ids = [delay.delay_id for delay in admin.list_delays(made) if delay.repeat is not None]
        assert len(ids) == 20
        assert set(admin.cancel_delays(ids).values()) == {None}
        wait_until(lambda: not list(admin.list_delays(made)), "they are gone")
