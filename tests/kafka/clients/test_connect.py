"""Kafka Connect in distributed mode: a file becomes a topic, and the topic a file, through kills.

The worker's own topics (configurations, offsets, status) are compacted topics of the appliance.
"""

from __future__ import annotations

import json
import pathlib
import urllib.error
import urllib.request
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, scan
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kafka.clients.programs import Program, engine_jars, java_command
from tests.kit.hosts.ports import free_port
from tests.kit.processes import kill_and_wait_for_successor, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("Java machines start, and groups time out the members that died"),
]
LINES = 3000
BATCH = 50


class Worker:
    """The properties of a Connect worker, its programs, and its REST interface."""

    def __init__(self, gateway: str, jars: str, directory: pathlib.Path) -> None:
        self._jars, self._directory = jars, directory
        self._url = f"http://127.0.0.1:{free_port()}"
        properties = {
            "bootstrap.servers": gateway,
            "group.id": "connect",
            "listeners": self._url,
            "config.storage.topic": "connect-configs",
            "offset.storage.topic": "connect-offsets",
            "status.storage.topic": "connect-status",
            "config.storage.replication.factor": 1,
            "offset.storage.replication.factor": 1,
            "offset.storage.partitions": 3,
            "status.storage.replication.factor": 1,
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.storage.StringConverter",
            "exactly.once.source.support": "enabled",
            "offset.flush.interval.ms": 500,
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 1000,
            "scheduled.rebalance.max.delay.ms": 1000,
            "consumer.auto.offset.reset": "earliest",
        }
        self._path = directory / "worker.properties"
        self._path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))

    def start(self) -> Program:
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        return Program(
            java_command(self._jars, main, str(self._path), heap="400m"), self._directory
        )

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask the REST interface; None: it does not answer yet."""
        request = urllib.request.Request(
            self._url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method="GET" if body is None else "PUT",
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as response:
                return json.load(response)
        except (OSError, urllib.error.URLError):
            return None

    def put(self, name: str, config: dict[str, Any]) -> None:
        wait_until(
            lambda: self.ask(f"/connectors/{name}/config", config) is not None,
            f"the worker takes the connector {name}",
        )

    def wait_for_tasks(self, name: str) -> None:
        """Wait until the connector and its task run."""

        def run() -> bool:
            found = self.ask(f"/connectors/{name}/status")
            return found is not None and [task["state"] for task in found["tasks"]] == ["RUNNING"]

        wait_until(run, f"the task of {name} runs")


def numbers(first: int, end: int) -> str:
    return "".join(f"line {number}\n" for number in range(first, end))


def sunk(path: pathlib.Path) -> set[str]:
    return set(path.read_text().splitlines()) if path.exists() else set()


def test_a_file_goes_through_a_topic_to_a_file_exactly_once(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path
) -> None:
    source, sink = tmp_path / "source.txt", tmp_path / "sink.txt"
    source.write_text(numbers(0, LINES))
    worker = Worker(gateway, engine_jars(), tmp_path)
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("from-file", 1)])
    with worker.start() as program:
        worker.put("source", {
            "connector.class": "org.apache.kafka.connect.file.FileStreamSourceConnector",
            "tasks.max": "1", "file": str(source), "topic": "from-file", "batch.size": str(BATCH),
            "exactly.once.support": "required",
        })  # fmt: skip
        worker.put("sink", {
            "connector.class": "org.apache.kafka.connect.file.FileStreamSinkConnector",
            "tasks.max": "1", "file": str(sink), "topics": "from-file",
        })  # fmt: skip
        wait_until(lambda: len(sunk(sink)) >= LINES // 3, "a third has come through")
        program.kill()
    with source.open("a") as file:
        file.write(numbers(LINES, 2 * LINES))
    with worker.start() as program:
        wait_until(lambda: len(sunk(sink)) >= LINES * 5 // 4, "the connectors go on")
        for victim in ("tr-kafka-0", "tr-groups-0", "tr-worker-0"):
            kill_and_wait_for_successor(appliance, victim)
        with source.open("a") as file:
            file.write(numbers(2 * LINES, 3 * LINES))
        # the source returns what stands in its buffer when more comes
        wait_until(lambda: len(sunk(sink)) >= 3 * LINES - BATCH, "nearly everything has come")
        with source.open("a") as file:
            file.write(numbers(3 * LINES, 3 * LINES + BATCH))
        wait_until(lambda: len(sunk(sink)) >= 3 * LINES, "everything has come through")
        worker.wait_for_tasks("source")
        program.stop()
    everything = numbers(0, 3 * LINES).splitlines()
    assert sunk(sink) >= set(everything)
    found: list[str] = []
    with Consumer("from-file", bootstrap=appliance.address, auto_offset_reset="earliest") as reader:
        while len(found) < 3 * LINES:
            some = reader.poll(timeout_ms=60_000)
            assert some, len(found)
            found += [bytes(record.value).decode() for record in some]
    assert found[: 3 * LINES] == everything
    with Admin(appliance.address) as admin:
        topics = admin.describe_topics(["connect-configs", "connect-offsets", "connect-status"])
    assert {each["configs"]["cleanup.policy"] for each in topics.values()} == {"compact"}


def test_structs_of_a_connector_fill_a_table(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path
) -> None:
    """A source of records with a schema, in JsonConverter's envelopes, through a kill of the
    gateway.
    """
    source = tmp_path / "lines.txt"
    source.write_text(numbers(0, LINES))
    schema = pa.schema([("line", pa.string()), ("origin", pa.string())])
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("lines", 1, schema=schema)])
    worker, transforms = (
        Worker(gateway, engine_jars(), tmp_path),
        "org.apache.kafka.connect.transforms",
    )
    found: list[dict[str, str]] = []

    def are_read(count: int) -> bool:
        for some in reader.poll_arrow(timeout_ms=300):
            found.extend(some.batch.to_pylist())
        return len(found) >= count

    with (
        worker.start() as program,
        Consumer("lines", bootstrap=appliance.address, auto_offset_reset="earliest") as reader,
    ):
        worker.put("lines", {
            "connector.class": "org.apache.kafka.connect.file.FileStreamSourceConnector",
            "tasks.max": "1", "file": str(source), "topic": "lines", "batch.size": str(BATCH),
            "value.converter": "org.apache.kafka.connect.json.JsonConverter",
            "value.converter.schemas.enable": "true", "transforms": "hoist,origin",
            "transforms.hoist.type": f"{transforms}.HoistField$Value",
            "transforms.hoist.field": "line",
            "transforms.origin.type": f"{transforms}.InsertField$Value",
            "transforms.origin.static.field": "origin",
            "transforms.origin.static.value": "file",
            "exactly.once.support": "required",
        })  # fmt: skip
        wait_until(lambda: are_read(LINES // 3), "a third has come")
        kill_and_wait_for_successor(appliance, "tr-kafka-0")
        # the source returns what stands in its buffer when more comes
        wait_until(lambda: are_read(LINES - BATCH), "nearly everything has come")
        program.stop()
    expected = [{"line": line, "origin": "file"} for line in numbers(0, LINES).splitlines()]
    assert found == expected[: len(found)]
    rows = scan("lines", appliance.address)
    with duckdb.connect() as database:
        counted = database.execute("select count(line) from rows where origin = 'file'").fetchall()
    assert counted[0][0] >= len(found)
    del rows
