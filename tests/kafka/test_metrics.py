"""Metrics of the gateway: requests, errors, durations, bytes and connections of Kafka clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from netfront.kafka.apis.table import APIS
from netfront.kafka.wire.definitions import definition
from netfront.kafka.wire.errors import KafkaError
from shm.memory.layout import KAFKA_APIS_MAX, KAFKA_CODES_MAX
from shm.messages.kafka_names import API_NAMES, CODE_NAMES
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.console import console_of, metrics
from tests.kit.peers.raw_kafka import RawKafka, kill_gateway
from tests.kit.processes import wait_until

PRODUCE, METADATA, API_VERSIONS = 0, 3, 18


@pytest.fixture
def watched() -> Iterator[EmbeddedAppliance]:
    running = start_embedded(settings={"kafka.listen": "127.0.0.1:0", "http.listen": "127.0.0.1:0"})
    try:
        yield running
    finally:
        running.stop()


def test_names_are_those_of_the_gateway() -> None:
    names = {api: str((definition(api) or {})["name"]) for api in APIS}
    assert names == API_NAMES
    assert {int(code): code.name for code in KafkaError} == CODE_NAMES
    assert max(API_NAMES) < KAFKA_APIS_MAX
    assert max(CODE_NAMES) + 1 < KAFKA_CODES_MAX


def test_requests_errors_and_bytes_are_counted_over_a_restart(watched: EmbeddedAppliance) -> None:
    missing: dict[str, Any] = {"name": "missing", "partition_data": [{"index": 0, "records": b""}]}
    asked = {"transactional_id": None, "acks": 1, "timeout_ms": 1_000, "topic_data": [missing]}

    def found(name: str, **labels: str) -> float:
        return metrics(console_of(watched)).get(
            (f"tailrace_kafka_{name}", frozenset(labels.items())), 0
        )

    for turn in (1, 2):
        with RawKafka(watched.kafka_addresses[0]) as client:
            for _ in range(3):
                client.ask(API_VERSIONS, 4, {"client_software_name": "t"})
            client.ask(PRODUCE, 9, asked)
            assert found("requests_total", api="ApiVersions") == 3 * turn
            assert found("request_errors_total", api="Produce") == turn
            assert found("errors_total", code="UNKNOWN_TOPIC_OR_PARTITION") == turn
            assert found("request_duration_seconds_count", api="Produce") == turn
            assert found("received_bytes_total") > 0
            assert found("sent_bytes_total") > 0
            wait_until(lambda: found("connections") == 1, "the connection is counted")
            client.send_bytes(b"\xff" * 4)
            wait_until(
                lambda turn=turn: found("refused_connections_total") == turn,  # type: ignore[misc]
                "the refusal is counted",
            )
        if turn == 1:
            kill_gateway(watched)
