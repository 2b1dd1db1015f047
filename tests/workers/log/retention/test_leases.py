"""Leases: kept over kills of the flusher and of everything, bound to their topic, bounded in
number, over when they are over.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from shm.runtime.timing_wheel import TimingWheel
from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_now
from tailrace.core.errors import InvalidRequestError, OffsetOutOfRangeError, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import Api
from tests.kit.appliances.orders import kill_everything
from tests.kit.processes import kill_and_wait_for_successor, stopped, wait_until
from workers.log.retention.leases import RetentionLeases

SECOND_NS = 1_000_000_000
SMALL_SEGMENTS = {"segment.bytes": 1 << 16, "retention.bytes": 1 << 16}
RECORDS = 800


def start(data_dir: pathlib.Path) -> EmbeddedAppliance:
    return start_embedded(data_dir=str(data_dir), auto_create_topics=False, settings={"slots": 64})


def produce(
    appliance: EmbeddedAppliance, topic: str, first: int, last: int, partition: int = 0
) -> None:
    with Producer(appliance.address, batch_size=16_384) as producer:
        for number in range(first, last):
            producer.send(topic, b"%d:" % number + b"x" * 400, partition=partition)


def beginning(appliance: EmbeddedAppliance, topic: str, partition: int = 0) -> int:
    with Consumer(bootstrap=appliance.address) as consumer:
        key = TopicPartition(topic, partition)
        return consumer.beginning_offsets([key])[key]


def kill_flusher(appliance: EmbeddedAppliance, topic: str, at: int) -> None:
    """Returns when a successor has recovered, looked at retention, and acknowledged a record."""
    kill_and_wait_for_successor(appliance, "tr-flusher-0")
    produce(appliance, topic, at, at + 1)


def test_a_lease_outlives_kills_of_the_flusher_and_of_everything(
    tmp_path: pathlib.Path, topic: str
) -> None:
    running = start(tmp_path)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic(topic, configs=SMALL_SEGMENTS)])
        produce(running, topic, 0, 10)
        admin.lease_offsets("job", {TopicPartition(topic, 0): 3}, 600_000)
    produce(running, topic, 10, RECORDS)
    kill_flusher(running, topic, RECORDS)
    assert beginning(running, topic) == 0, "the segment that the lease begins in stays"
    kill_everything(running)
    running = start(tmp_path)
    try:
        produce(running, topic, RECORDS + 1, RECORDS + 2)
        assert beginning(running, topic) == 0
        kill_flusher(running, topic, RECORDS + 2)
        assert beginning(running, topic) == 0
        with Admin(running.address) as admin:
            admin.lease_offsets("job", {TopicPartition(topic, 0): 3}, 0)
            wait_until(lambda: beginning(running, topic) > 3, "retention takes what was given back")
            with pytest.raises(OffsetOutOfRangeError):
                admin.lease_offsets("late", {TopicPartition(topic, 0): 3}, 1000)
    finally:
        assert running.stop() == 0


def test_a_lease_that_was_given_back_stays_so_over_kills(
    tmp_path: pathlib.Path, topic: str
) -> None:
    running = start(tmp_path)
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(topic, configs=SMALL_SEGMENTS)])
            produce(running, topic, 0, 10)
            admin.lease_offsets("job", {TopicPartition(topic, 0): 0}, 600_000)
            admin.lease_offsets("job", {TopicPartition(topic, 0): 0}, 0)
        kill_flusher(running, topic, 10)
        produce(running, topic, 11, RECORDS)
        wait_until(lambda: beginning(running, topic) > 0, "nothing keeps the segments")
    finally:
        assert running.stop() == 0


def test_a_topic_in_a_reused_slot_inherits_no_lease(tmp_path: pathlib.Path, topic: str) -> None:
    running = start(tmp_path)
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(f"{topic}-old", configs=SMALL_SEGMENTS)])
            produce(running, f"{topic}-old", 0, 10)
            admin.lease_offsets("job", {TopicPartition(f"{topic}-old", 0): 0}, 600_000)
            admin.delete_topics([f"{topic}-old"])
            admin.create_topics(
                [NewTopic(topic, configs=SMALL_SEGMENTS)]
            )  # the first free slot is the old one's
            produce(running, topic, 0, RECORDS)
            wait_until(lambda: beginning(running, topic) > 0, "retention runs in the new topic")
            admin.create_topics(
                [NewTopic(f"{topic}-old", configs=SMALL_SEGMENTS)]
            )  # nor does one of the same name
        produce(running, f"{topic}-old", 0, RECORDS)
        wait_until(
            lambda: beginning(running, f"{topic}-old") > 0,
            "retention runs in a topic of the old name",
        )
    finally:
        assert running.stop() == 0


def test_a_lease_is_answered_when_the_flusher_has_taken_it(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """Else a log's start that is answered could move behind what was leased while the lease is on
    its way.
    """

    from tests.kit.processes import children

    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    connection = Connection(appliance.address, "raw")
    flusher = children(appliance)["tr-flusher-0"]
    request = {
        "lease": "job",
        "ttl_ms": 1000,
        "partitions": [{"topic": topic, "partition": 0, "offset": 0}],
    }
    try:
        call_now(connection, Api.PING, [], 10_000)
        with stopped(flusher), pytest.raises(TailraceError, match="no answer"):
            call_now(connection, Api.LEASE_OFFSETS, [requests.encode_json(request)], 500)
        answer = requests.decode_json(
            call_now(connection, Api.LEASE_OFFSETS, [requests.encode_json(request)], 20_000).body[0]
        )
        assert answer == {"log_start_offsets": [0]}
        old_form = {"lease": "job", "ttl_ms": 1000, "topic": topic, "partition": 0, "offset": 0}
        assert requests.decode_json(
            call_now(connection, Api.LEASE_OFFSETS, [requests.encode_json(old_form)], 20_000).body[
                0
            ]
        ) == {"log_start_offset": 0}
    finally:
        connection.close()


def test_leases_are_bounded_and_the_refusal_says_what_to_do(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    from appliance.control import offset_leases as leases

    key = TopicPartition(topic, 0)
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
        for number in range(leases.PER_PARTITION_MAX):
            admin.lease_offsets(f"job-{number}", {key: 0}, 600_000)
        with pytest.raises(InvalidRequestError, match=r"has 64 leases.*release some.*in \d+ s"):
            admin.lease_offsets("one-more", {TopicPartition(topic, 1): 0, key: 0}, 600_000)
        admin.lease_offsets("job-7", {key: 0}, 600_000)  # renewed
        admin.lease_offsets("job-8", {key: 0}, 0)
        admin.lease_offsets("one-more", {key: 0}, 600_000)
        for number in range(
            leases.PER_PARTITION_MAX
        ):  # a refused request has left nothing: the other partition has room for all
            admin.lease_offsets(f"job-{number}", {TopicPartition(topic, 1): 0}, 1)


@pytest.mark.parametrize(
    "request_fields",
    [
        {"lease": "", "ttl_ms": 1, "partitions": [{"topic": "T", "partition": 0, "offset": 0}]},
        {
            "lease": "x" * 101,
            "ttl_ms": 1,
            "partitions": [{"topic": "T", "partition": 0, "offset": 0}],
        },
        {
            "lease": "x",
            "ttl_ms": 86_400_001,
            "partitions": [{"topic": "T", "partition": 0, "offset": 0}],
        },
        {"lease": "x", "ttl_ms": True, "partitions": [{"topic": "T", "partition": 0, "offset": 0}]},
        {
            "lease": "x",
            "ttl_ms": 1,
            "partitions": [{"topic": "T", "partition": 0, "offset": 2**63}],
        },
        {"lease": "x", "ttl_ms": 1, "partitions": [{"topic": "T", "partition": 0, "offset": -1}]},
        {"lease": "x", "ttl_ms": 1, "partitions": [{"topic": "T", "partition": [], "offset": 0}]},
        {"lease": "x", "ttl_ms": 1, "partitions": [{"topic": {}, "partition": 0, "offset": 0}]},
        {"lease": "x", "ttl_ms": 1, "partitions": []},
        {"lease": "x", "ttl_ms": 1, "partitions": {}},
        {"lease": "x", "ttl_ms": 1, "partitions": [5]},
        {"lease": "x", "ttl_ms": 1},
    ],
)
def test_a_lease_that_makes_no_sense_is_refused(
    appliance: EmbeddedAppliance, topic: str, request_fields: dict[str, Any]
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    body = requests.encode_json(request_fields).replace(b'"T"', b'"%s"' % topic.encode())
    connection = Connection(appliance.address, "raw")
    try:
        with pytest.raises(TailraceError) as caught:
            call_now(connection, Api.LEASE_OFFSETS, [body], 10_000)
        assert caught.value.code.name in ("INVALID_REQUEST", "UNKNOWN_TOPIC")
    finally:
        connection.close()


class Partition:
    """Leases of a flusher on a clock of its own."""

    def __init__(self) -> None:
        self.wheel: TimingWheel[Any] = TimingWheel(SECOND_NS, tick_ns=1_000_000)
        self.ended: list[tuple[bytes, int]] = []
        self.leases = RetentionLeases(self.wheel, self._on_end)
        self.now_ns = SECOND_NS

    def _on_end(self, key: tuple[bytes, int]) -> int:
        self.ended.append(key)
        return 0

    def apply(self, topic_id: bytes, name: str, offset: int, ttl_ms: int) -> None:
        requested = {
            "topic_id": topic_id.hex(),
            "partition": 0,
            "lease": name,
            "offset": offset,
            "ttl_ms": ttl_ms,
        }
        self.leases.apply(requested, self.now_ns)

    def pass_time(self, ms: int) -> None:
        self.now_ns += ms * 1_000_000
        for act in self.wheel.advance(self.now_ns):
            act()


def test_a_lease_ends_by_time_and_a_renewed_one_later() -> None:
    partition, (a, b) = Partition(), (b"a" * 16, b"b" * 16)
    partition.apply(a, "one", 7, 100)
    partition.apply(a, "two", 5, 1000)
    partition.apply(b, "one", 3, 1000)
    assert [partition.leases.lowest((topic_id, 0)) for topic_id in (a, b)] == [5, 3]
    partition.pass_time(90)
    partition.apply(a, "one", 4, 100)  # renewed, from a lower offset on
    partition.pass_time(90)
    assert partition.leases.lowest((a, 0)) == 4
    partition.pass_time(20)
    assert partition.leases.lowest((a, 0)) == 5
    assert partition.ended == [(a, 0)]
    partition.apply(a, "two", 5, 0)
    partition.apply(a, "never-held", 5, 0)
    assert partition.ended == [(a, 0), (a, 0)]
    partition.leases.forget((b, 0))
    partition.pass_time(5000)
    assert (len(partition.leases), len(partition.ended), partition.leases.lowest((b, 0))) == (
        0,
        2,
        None,
    )
