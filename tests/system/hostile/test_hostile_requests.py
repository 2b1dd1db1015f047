"""Requests that are meant to harm, against a running appliance: each is answered, nothing is
restarted, and another client goes on meanwhile.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import orjson
import psutil
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.core.error_codes import ErrorCode
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.protocol import json_messages as requests
from tailrace.protocol.fetch_messages import FetchEntry, FetchRequest
from tailrace.protocol.frame import Api, RequestHeader, decode_response_header
from tests.kit.matrices import case
from tests.kit.peers.raw_client import RawClient
from tests.kit.peers.raw_zmtp import RawPeer, message
from tests.kit.processes import children, kill_and_wait_for_successor, wait_until

PARTITIONS = 512


@pytest.fixture(autouse=True)
def nothing_restarted(appliance: EmbeddedAppliance) -> Iterator[None]:
    before = children(appliance)
    yield
    assert before.items() <= children(appliance).items(), (
        "a process ended"
    )  # that of groups may have begun
    with Admin(appliance.address) as admin:
        assert not any(process["restarts"] for process in admin.describe_cluster()["processes"])


@pytest.fixture(scope="module")
def wide(appliance: EmbeddedAppliance) -> str:
    """A topic of many partitions."""
    name = f"wide-{os.urandom(4).hex()}"
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name, PARTITIONS)])
    return name


def front_bytes(appliance: EmbeddedAppliance) -> int:
    return int(psutil.Process(children(appliance)["tr-front-0"]).memory_info().rss)


def nested(depth: int, key: str = "x") -> bytes:
    return b'{"%b":' % key.encode() + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize("depth", [31, 40, 300, 1_000, 100_000])
def test_deeply_nested_json_is_answered(appliance: EmbeddedAppliance, depth: int) -> None:
    for api in Api:
        if api in (Api.PRODUCE, Api.FETCH, Api.CREDIT, Api.PING):
            continue
        with RawClient(appliance.address) as client:
            for key in ("topics", "partitions", "versions", "after", "topic"):
                with case(api, key):
                    code, answer = client.ask(api, nested(depth, key))
                    assert code is not ErrorCode.INTERNAL_ERROR, answer
                    if depth > requests.JSON_DEPTH_MAX:
                        assert code in (ErrorCode.MALFORMED_REQUEST, ErrorCode.REQUEST_TOO_LARGE)


def test_whoever_speaks_another_protocol_is_told_and_its_connection_ends(
    appliance: EmbeddedAppliance,
) -> None:
    """A ZeroMQ client of something else got silence: its first frame's answer looked like a
    push.
    """
    with RawPeer(appliance.address) as peer:
        peer.shake_zmtp()
        peer.send(message([b"QRRT" + RequestHeader(Api.PING, 1, 5, 0).to_bytes()[4:]]))
        answer = decode_response_header(peer.receive_message()[0])
        assert (answer.api, answer.correlation_id, answer.error) == (
            Api.PING,
            5,
            ErrorCode.MALFORMED_REQUEST,
        )
        peer.request(Api.PING, [], 6)
        answer = decode_response_header(peer.receive_message()[0])
        assert (answer.correlation_id, answer.error) == (6, ErrorCode.SESSION_UNKNOWN), (
            "a wrong magic alone closes nothing"
        )
        peer.send(message([b"", b"a request of a REQ socket"]))
        head, sentence = peer.receive_message()
        assert decode_response_header(head).error == ErrorCode.MALFORMED_REQUEST
        assert b"24 bytes" in sentence
        assert peer.is_closed()


ODD = [
    b"", b"null", b"5", b"[]", b'"x"', b'{"topics":NaN}', b'{"topics":1e999}',
    b'{"topics":["\\ud800"]}', b'{"topics":["\xff"]}', b'{"topics":{"a":1}}',
    b'{"topics":[1180591620717411303424]}', b'{"topics":[null,true,-1,{},[]]}',
    b'{"topics":null,"names_only":[]}', b'{"topics":null,"after":{}}',
    b'{"partitions":[1180591620717411303424]}',
    b'{"partitions":[{"topic":1180591620717411303424,"partition":1180591620717411303424,"at":{}}]}',
    b'{"partitions":[{"topic":"t","partition":true,"at":"latest"}]}',
    b'{"partitions":[{"topic":"t","partition":-1,"at":-9223372036854775808}]}',
    b'{"partitions":[{"topic":"t","partition":0,"at":{"behind":-9223372036854775808}}]}',
    b'{"partitions":[{"topic":"t"}]}',
    b'{"partitions":[{"topic":"t","partition":0,"at":"' + b"x" * 100_000 + b'"}]}',
    b'{"versions":{"1":[true,1e30]},"client_id":{}}',
    b'{"versions":{"1":[1,1]},"client_id":{"a":1}}',
    b'{"versions":' + orjson.dumps({str(n): [1, 1] for n in range(5_000)}) + b"}",
]  # fmt: skip


@pytest.mark.parametrize("api", [Api.HANDSHAKE, Api.METADATA, Api.LIST_OFFSETS])
def test_odd_values_are_answered(appliance: EmbeddedAppliance, topic: str, api: Api) -> None:
    with RawClient(appliance.address) as client:
        for body in ODD:
            code, answer = client.ask(api, body.replace(b'"t"', b'"%b"' % topic.encode()))
            assert code is not ErrorCode.INTERNAL_ERROR, (body[:80], answer)
            assert len(orjson.dumps(answer)) < 10_000, "what comes back is bounded"


class Producing:
    """Another client, well-behaved, all the while: how long its slowest batch took."""

    def __init__(self, appliance: EmbeddedAppliance, name: str) -> None:
        self._address, self._name = appliance.address, name
        self._stop = threading.Event()
        self.latencies_s: list[float] = []
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        with Producer(self._address, acks=1) as producer:
            while not self._stop.is_set():
                began = time.perf_counter()
                producer.send(self._name, b"still here", partition=0).result(60)
                self.latencies_s.append(time.perf_counter() - began)

    def __enter__(self) -> Producing:
        self._thread.start()
        try:
            wait_until(lambda: len(self.latencies_s) > 3, "it produces")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()


def test_large_lookups_in_numbers_hold_nobody_and_cost_no_memory(
    appliance: EmbeddedAppliance, wide: str
) -> None:
    before = front_bytes(appliance)
    with RawClient(appliance.address) as client, Producing(appliance, wide) as other:
        names = orjson.dumps({"topics": [wide] * 4_000})
        offsets = orjson.dumps(
            {
                "partitions": [
                    {"topic": wide, "partition": p, "at": "latest"} for p in range(PARTITIONS)
                ]
                * 8
            }
        )
        too_many = orjson.dumps({"partitions": [{"topic": "t", "partition": 0, "at": 0}] * 10_000})
        asked = [
            client.send(api, body)
            for _ in range(10)
            for api, body in ((Api.METADATA, names), (Api.LIST_OFFSETS, offsets))
        ]
        refused = [client.send(Api.LIST_OFFSETS, too_many) for _ in range(10)]
        count = len(other.latencies_s)
        codes = [client.answer(number)[0] for number in asked]
        assert {client.answer(number)[0] for number in refused} <= {
            ErrorCode.REQUEST_TOO_LARGE,
            ErrorCode.TOO_MANY_REQUESTS,
        }
        assert set(codes) == {ErrorCode.OK}
        assert len(other.latencies_s) > count + 5, "another client was served while these were"
    assert front_bytes(appliance) - before < 100 << 20


def test_wide_waiting_fetches_hold_nobody(appliance: EmbeddedAppliance, wide: str) -> None:
    with (
        Admin(appliance.address) as admin,
        RawClient(appliance.address) as client,
        Producing(appliance, wide) as other,
    ):
        topic_id = admin.topic_info([wide])[wide].topic_id
        ends = admin.offsets({TopicPartition(wide, p): "latest" for p in range(1, PARTITIONS)})
        entries = [
            FetchEntry(topic_id, p, -1, ends[TopicPartition(wide, p)]["end"], 1 << 20)
            for p in range(1, PARTITIONS)
        ]
        asked = [
            client.fetch(FetchRequest(60_000, 1, 1 << 20, 0, entries))
            for _ in range(16_384 // (PARTITIONS - 1))
        ]
        over = client.fetch(FetchRequest(60_000, 1, 1 << 20, 0, entries * 2))
        assert client.fetched(over)[0] is ErrorCode.INVALID_REQUEST
        assert (
            client.fetched(client.fetch(FetchRequest(60_000, 1, 1 << 20, 0, entries)))[0]
            is ErrorCode.TOO_MANY_REQUESTS
        )
        count = len(other.latencies_s)
        wait_until(
            lambda: len(other.latencies_s) > count + 20,
            "others produce into another partition of the same topic",
        )
        with Producer(appliance.address, acks=1) as producer:
            producer.send(wide, b"wanted", partition=7).result(60)
        code, entries_and_data = client.fetched(asked[0])
        assert code is ErrorCode.OK
        assert [entry.partition for entry, data in entries_and_data if len(data)] == [7]


def test_fetches_of_deleted_topics_are_answered_and_cost_nothing_after(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin, RawClient(appliance.address) as client:
        for number in range(3):
            name = f"{topic}-{number}"
            admin.create_topics([NewTopic(name)])
            topic_id = admin.topic_info([name])[name].topic_id
            waiting = [
                client.fetch(
                    FetchRequest(60_000, 1, 1 << 20, 0, [FetchEntry(topic_id, 0, -1, 0, 1 << 20)])
                )
                for _ in range(300)
            ]
            client.ask(Api.METADATA, {"topics": []})
            admin.delete_topics([name])
            for number_of in waiting:
                code, answers = client.fetched(number_of)
                assert code is ErrorCode.OK
                assert answers[0][0].error == ErrorCode.UNKNOWN_TOPIC_ID
        admin.create_topics([NewTopic(topic)])
        topic_id = admin.topic_info([topic])[topic].topic_id
        full = [
            client.fetch(
                FetchRequest(60_000, 1, 1 << 20, 0, [FetchEntry(topic_id, 0, -1, 0, 1 << 20)])
            )
            for _ in range(1_025)
        ]
        assert client.fetched(full[-1])[0] is ErrorCode.TOO_MANY_REQUESTS, (
            "of the deleted ones none counts any more"
        )


def test_the_sdk_pages_what_is_large(appliance: EmbeddedAppliance, wide: str) -> None:
    with Admin(appliance.address) as admin:
        described = admin.describe_topics()
        assert len(described[wide]["partitions"]) == PARTITIONS
        assert admin.partition_counts()[wide] == PARTITIONS
        many = {TopicPartition(wide, p): "latest" for p in range(PARTITIONS)}
        assert (
            admin.offsets(
                {**many, **{TopicPartition("no-such", p): "latest" for p in range(5_000)}}
            ).keys()
            >= many.keys()
        )
    with Consumer(bootstrap=appliance.address) as consumer:
        assert len(consumer.end_offsets(many)) == PARTITIONS


def test_requests_to_the_controller_in_numbers_are_refused_and_the_sdk_asks_again(
    appliance: EmbeddedAppliance,
) -> None:
    with RawClient(appliance.address) as client:
        asked = [client.send(Api.DESCRIBE_CLUSTER, b"{}") for _ in range(2_000)]
        codes = {client.answer(number)[0] for number in asked}
        assert codes <= {ErrorCode.OK, ErrorCode.TOO_MANY_REQUESTS}
        assert ErrorCode.OK in codes
    with Admin(appliance.address) as admin:
        assert admin.describe_cluster()["processes"]


def test_what_a_killed_controller_had_not_taken_its_successor_does_and_the_sdk_asks_again(
    topic: str,
) -> None:
    running = start_embedded()
    try:
        with Admin(running.address) as admin, Producer(running.address) as producer:
            admin.create_topics([NewTopic(topic)])
            producer.send(topic, b"x").result(60)
            name = "tr-controller-0"
            os.kill(children(running)[name], signal.SIGSTOP)
            with RawClient(running.address) as client:
                left = client.send(
                    Api.CREATE_TOPICS,
                    orjson.dumps(
                        {
                            "topics": [
                                {
                                    "name": f"{topic}-2",
                                    "partitions": 1,
                                    "configs": {},
                                    "schema": None,
                                }
                            ]
                        }
                    ),
                )
                client.ask(Api.METADATA, {"topics": [topic]})
                kill_and_wait_for_successor(running, name)
                code, _ = client.answer(left)
                assert code is ErrorCode.OK, "it was not taken yet: the successor does it"
                assert admin.describe_cluster()["processes"]
    finally:
        assert running.stop() == 0
