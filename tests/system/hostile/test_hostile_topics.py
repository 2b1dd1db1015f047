"""Requests about topics that no client should send: each entry is answered with a code and a
sentence, and no process ends.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa
import pytest

from appliance.config.topic_config import DELAY_NAME_MAX, NAME_MAX
from appliance.control.topics.change import ENTRIES_MAX, OFFSETS_MAX
from appliance.control.topics.change_queue import CHANGES_MAX
from appliance.control.topics.schema_validation import SCHEMA_MAX_BYTES
from netfront.forward.forwarder import SESSION_REQUESTS_MAX
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_now
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidTopicNameError, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.protocol.frame import Api
from tests.kit.processes import HANG_LIMIT_S

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e300,
    2**63,
    2**64,
    "",
    "x",
    "1",
    "\x00",
    "ü" * 300,
    [],
    [1],
    {},
    {"a": 1},
    [[[[]]]],
]


@pytest.fixture
def connection(appliance: EmbeddedAppliance) -> Iterator[Connection]:
    found = Connection(appliance.address, "hostile")
    yield found
    found.close()
    with Admin(appliance.address) as admin, Producer(appliance.address, acks="all") as producer:
        name = f"check-{os.urandom(4).hex()}"
        admin.create_topics([NewTopic(name)])
        assert producer.send(name, b"still here").result(60).offset == 0
        assert all(
            (process["restarts"], process["internal_errors"]) == (0, 0)
            for process in admin.describe_cluster()["processes"]
        )


def ask(
    connection: Connection, api: Api, request: dict[str, Any]
) -> tuple[ErrorCode, dict[str, Any]]:
    """The code of the answer, and what it says."""
    try:
        answer = call_now(connection, api, [json.dumps(request).encode()], 40_000)
    except TailraceError as error:
        return error.code, {"message": error.detail}
    return ErrorCode.OK, orjson.loads(answer.body[0])


def results(connection: Connection, api: Api, items: list[Any]) -> list[dict[str, Any]]:
    code, answer = ask(connection, api, {"topics": items})
    assert code is ErrorCode.OK, answer
    assert len(answer["results"]) == len(items)
    return list(answer["results"])


def schema_with(message: bytes, old: bytes, new: bytes) -> str:
    assert old in message
    return base64.b64encode(message.replace(old, new)).decode()


def test_a_schema_with_an_enum_that_does_not_exist(connection: Connection, topic: str) -> None:
    """Floating point precision 7: this ended the controller, and its successors, which read the
    request again.
    """
    message = pa.schema([("x", pa.float32())]).serialize().to_pybytes()
    bent = []
    for index in range(8, len(message)):
        if message[index] == 1:
            bent.append(
                {
                    "name": f"{topic}-{index}",
                    "schema": base64.b64encode(
                        message[:index] + b"\x07" + message[index + 1 :]
                    ).decode(),
                }
            )
    found = results(connection, Api.CREATE_TOPICS, bent)
    assert any("precision" in result.get("message", "") for result in found)


def test_odd_values_in_every_field_of_every_request(connection: Connection, topic: str) -> None:
    results(connection, Api.CREATE_TOPICS, [{"name": topic}])
    fields = {
        Api.CREATE_TOPICS: ("name", "partitions", "configs", "schema", "delay_schema"),
        Api.ALTER_TOPICS: ("name", "partitions", "configs", "online"),
        Api.DELETE_RECORDS: ("name", "partitions"),
        Api.DELETE_TOPICS: ("name",),
    }
    for api, names in fields.items():
        for field in names:
            items: list[Any] = [
                {"name": f"{topic}-{number}" if api is Api.CREATE_TOPICS else topic, field: odd}
                for number, odd in enumerate(ODD)
            ]
            for result in results(connection, api, [*items, *ODD]):
                assert ErrorCode(result["code"]) is not ErrorCode.INTERNAL_ERROR, (
                    api,
                    field,
                    result,
                )
        for odd in ODD:
            code, _ = ask(connection, api, {"topics": odd})
            assert code in (ErrorCode.INVALID_REQUEST, ErrorCode.OK)
    for setting in ("retention.ms", "delay.enabled", "delay.levels", "compression.type", "no.such"):
        for result in results(
            connection,
            Api.ALTER_TOPICS,
            [{"name": topic, "configs": {setting: odd}} for odd in ODD],
        ):
            assert ErrorCode(result["code"]) in (
                ErrorCode.OK,
                ErrorCode.INVALID_SETTING,
                ErrorCode.UNKNOWN_TOPIC,
            ), result


@pytest.mark.parametrize("key", ["topic", "partition", "offset", "ttl_ms", "lease"])
def test_odd_values_in_a_lease(connection: Connection, topic: str, key: str) -> None:
    results(connection, Api.CREATE_TOPICS, [{"name": topic, "partitions": 2}])
    good = {"topic": topic, "partition": 0, "offset": 0, "ttl_ms": 10, "lease": "x"}
    for odd in ODD:
        code, _ = ask(connection, Api.LEASE_OFFSETS, {**good, key: odd})
        fine = {"lease": ("x", "1", "\x00"), "partition": (0,), "offset": (0,), "ttl_ms": (0,)}.get(
            key, ()
        )
        is_fine = any(type(odd) is type(each) and odd == each for each in fine)
        assert code is (
            ErrorCode.OK
            if is_fine
            else ErrorCode.UNKNOWN_TOPIC
            if key == "topic"
            else ErrorCode.INVALID_REQUEST
        ), odd


def test_odd_values_in_the_other_requests(connection: Connection) -> None:
    for odd in ODD:
        for api, field in (
            (Api.INIT_PRODUCER_ID, "producer_id"),
            (Api.INIT_PRODUCER_ID, "producer_epoch"),
            (Api.DESCRIBE_CLUSTER, "offline_after"),
        ):
            code, _ = ask(connection, api, {"producer_id": 5, field: odd})
            assert code in (ErrorCode.OK, ErrorCode.INVALID_REQUEST)


def test_long_names_and_values_are_not_sent_back(connection: Connection) -> None:
    for item in (
        {"name": "n" * 200_000},
        {"name": "ok", "configs": {"s" * 200_000: 1}},
        {"name": "ok", "configs": {"retention.ms": "9" * 200_000}},
    ):
        for api in (Api.CREATE_TOPICS, Api.ALTER_TOPICS, Api.DELETE_TOPICS):
            (result,) = results(connection, api, [item])
            assert result["code"]
            assert len(orjson.dumps(result)) < 1_000


def test_a_thousand_entries_that_all_fail_at_length_are_answered(connection: Connection) -> None:
    item = {"name": '"\\\u0001' * 30, "configs": {}}
    found = results(connection, Api.CREATE_TOPICS, [item] * ENTRIES_MAX)
    assert {result["code"] for result in found} == {int(ErrorCode.INVALID_TOPIC_NAME)}


def test_a_topic_named_twice_in_one_request(connection: Connection, topic: str) -> None:
    first, second = results(connection, Api.CREATE_TOPICS, [{"name": topic}, {"name": topic}])
    assert (first["code"], second["code"]) == (0, ErrorCode.TOPIC_EXISTS)
    altered = results(
        connection, Api.ALTER_TOPICS, [{"name": topic, "partitions": count} for count in (2, 3, 4)]
    )
    assert [result["code"] for result in altered] == [0, 0, 0]
    first, second = results(connection, Api.DELETE_TOPICS, [{"name": topic}, {"name": topic}])
    assert (first["code"], second["code"]) == (0, ErrorCode.UNKNOWN_TOPIC)


def test_offsets_of_more_partitions_than_an_answer_holds(
    connection: Connection, topic: str
) -> None:
    results(connection, Api.CREATE_TOPICS, [{"name": topic}])
    item = {"name": topic, "partitions": {str(number): 0 for number in range(OFFSETS_MAX + 1)}}
    (result,) = results(connection, Api.DELETE_RECORDS, [item])
    assert result["code"] == ErrorCode.REQUEST_TOO_LARGE


def test_a_thousand_topics_in_one_request_while_another_client_is_served(
    appliance: EmbeddedAppliance, connection: Connection, topic: str
) -> None:
    names = [f"{topic}-{number}" for number in range(300)]
    assert not any(
        result["code"]
        for result in results(connection, Api.CREATE_TOPICS, [{"name": name} for name in names])
    )
    assert not any(
        result["code"]
        for result in results(connection, Api.DELETE_TOPICS, [{"name": name} for name in names])
    )


def column(name: str) -> str:
    return base64.b64encode(
        pa.schema([(name, pa.int8()), ("b", pa.int8())]).serialize().to_pybytes()
    ).decode()


def test_schemas_that_a_topic_may_not_have(connection: Connection, topic: str) -> None:
    def message(schema: pa.Schema) -> str:
        return base64.b64encode(schema.serialize().to_pybytes()).decode()

    large = message(
        pa.schema(
            [("c" * 60 + str(number), pa.int8()) for number in range(SCHEMA_MAX_BYTES // 100)]
        )
    )
    for schema, reason in (
        (column("b"), "twice"),
        (column(""), "empty"),
        (column("@due_us"), "begin with @"),
        (message(pa.schema([("a", pa.null())])), "all null"),
        (large, "the limit is"),
        ("AAAA", "Arrow"),
        ("ä", "base64"),
    ):
        (result,) = results(connection, Api.CREATE_TOPICS, [{"name": topic, "schema": schema}])
        assert result["code"] == ErrorCode.INVALID_SCHEMA
        assert reason in result["message"]


def test_a_delay_schema_whose_columns_lie_alike_and_are_of_other_types(
    connection: Connection, topic: str
) -> None:
    own = pa.schema([("a", pa.int8())])
    for due in (pa.uint64(), pa.timestamp("us"), pa.float64()):
        delayed = pa.schema(
            [*own, ("@due_us", due), ("@origin", pa.int64()), ("@repeat", pa.utf8())]
        )
        item = {"name": topic, "configs": {"delay.enabled": True},
        "schema": base64.b64encode(own.serialize().to_pybytes()).decode(),
                "delay_schema": base64.b64encode(delayed.serialize().to_pybytes()).decode()}  # fmt: skip  # noqa: E501
        (result,) = results(connection, Api.CREATE_TOPICS, [item])
        assert result["code"] == ErrorCode.INVALID_SCHEMA, due


@pytest.mark.parametrize(
    ("length", "configs"),
    [(NAME_MAX, {}), (DELAY_NAME_MAX, {"delay.enabled": True}), (237, {}), (243, {})],
)
def test_the_longest_names_are_made_used_deleted_and_made_again(
    appliance: EmbeddedAppliance,
    connection: Connection,
    topic: str,
    length: int,
    configs: dict[str, Any],
) -> None:
    name = topic.ljust(length, "n")
    with Admin(appliance.address) as admin:
        for value in (b"first", b"second"):
            admin.create_topics([NewTopic(name, 2, configs)])
            with Producer(appliance.address, acks="all") as producer:
                assert producer.send(name, value, partition=1).result(60).offset == 0
            with Consumer(
                name, bootstrap=appliance.address, auto_offset_reset="earliest"
            ) as consumer:
                assert [record.value for record in consumer.poll(60_000)] == [value]
            admin.delete_topics([name])
            assert not [
                entry for entry in os.listdir(appliance.data_dir) if entry.startswith(topic)
            ]
        with pytest.raises(InvalidTopicNameError, match=f"{NAME_MAX}|{DELAY_NAME_MAX}"):
            admin.create_topics(
                [NewTopic(name + "n" * (NAME_MAX + 1 - length if not configs else 1), 1, configs)]
            )


def test_more_changes_at_once_than_a_front_may_have_are_asked_to_come_again(
    connection: Connection, topic: str
) -> None:
    """Pipelined, each of many entries, so that they are under way together."""
    ask(connection, Api.DESCRIBE_CLUSTER, {})
    payload = orjson.dumps({"topics": [{"name": "no such topic"}] * ENTRIES_MAX})
    codes: list[ErrorCode] = []
    count = SESSION_REQUESTS_MAX  # more of one connection its front refuses
    assert count > CHANGES_MAX
    for _ in range(count):
        assert connection.request(
            Api.DELETE_TOPICS,
            [payload],
            lambda answer: codes.append(answer.code if answer else ErrorCode.NOT_REACHABLE),
        )
    deadline_s = time.monotonic() + HANG_LIMIT_S
    while len(codes) < count:
        assert time.monotonic() < deadline_s, "each request is answered"
        connection.wait(100_000_000)
        connection.process()
    assert set(codes) == {ErrorCode.OK, ErrorCode.NOT_READY}
    assert codes.count(ErrorCode.OK) >= CHANGES_MAX
