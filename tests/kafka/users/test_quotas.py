"""A Kafka client beyond its rate is told how long to wait, and others are not slowed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import confluent_kafka
import pytest

from tailrace import NewTopic, QuotaEntity
from tests.kit.appliances.secured import Users, secured
from tests.kit.peers.kafka_logins import add, connect, librdkafka
from tests.kit.processes import HANG_LIMIT_S

METADATA = 3


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    settings = {"kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true"}
    with secured(tmp_path_factory.mktemp("quotas"), **settings) as found:
        found.admin.create_topics([NewTopic("orders")])
        for name in ("slow", "asking", "quick"):
            add(found, name, "write topic orders", "read topic orders", "read group g")
        found.admin.alter_quotas(
            {
                QuotaEntity(user="slow"): {"producer_byte_rate": 20_000},
                QuotaEntity(user="asking"): {"request_rate": 1},
            }
        )
        yield found


def produce(users: Users, user: str) -> tuple[list[float], set[Any]]:
    """Send records of 30 KB in all, twice. Returns the throttle times, and the errors."""
    throttles: list[float] = []
    errors: set[Any] = set()
    producer = confluent_kafka.Producer(
        {
            **librdkafka(users, user), "linger.ms": 50,
            "throttle_cb": lambda event: throttles.append(event.throttle_time),
        }
    )  # fmt: skip
    for _ in range(2):
        for _ in range(3):
            producer.produce(
                "orders", bytes(10_000), on_delivery=lambda error, _: errors.add(error)
            )
        assert producer.flush(HANG_LIMIT_S) == 0
    producer.poll(0)
    return throttles, errors


def test_a_producer_beyond_its_rate_is_told_to_wait(users: Users) -> None:
    throttles, errors = produce(users, "slow")
    assert errors == {None}
    assert max(throttles) > 0
    throttles, errors = produce(users, "quick")
    assert (errors, max(throttles, default=0)) == ({None}, 0)


def test_requests_beyond_their_rate_wait_with_their_connection(users: Users) -> None:
    with connect(users, "asking") as client, connect(users, "quick") as other:
        offsets = {
            "replica_id": -1, "isolation_level": 0,
            "topics": [{"name": "orders", "partitions": [
                {"partition_index": 0, "timestamp": -1, "current_leader_epoch": -1}]}],
        }  # fmt: skip
        begun = time.monotonic()
        told = [client.ask(2, 6, offsets)["throttle_time_ms"] for _ in range(3)]
        assert max(told) > 0
        assert client.ask(METADATA, 9, {"topics": None})["topics"]
        assert time.monotonic() - begun > 1, "the connection has waited"
        assert other.ask(2, 6, offsets)["throttle_time_ms"] == 0
