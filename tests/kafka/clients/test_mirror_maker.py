"""MirrorMaker copies topics, their settings and offsets of groups from one appliance to another,
exactly once, through kills.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kafka.clients.programs import Program, engine_jars, java_command
from tests.kafka.conftest import SETTINGS
from tests.kit.hosts.ports import free_port
from tests.kit.processes import kill_and_wait_for_successor, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("Java machines start, and groups time out the members that died"),
]
RECORDS = 2000
PARTITIONS = 2


def write(appliance: EmbeddedAppliance, first: int) -> None:
    with Producer(appliance.address) as producer:
        for number in range(first, first + RECORDS):
            producer.send("mirrored", b"%d" % number, key=b"key", partition=number % PARTITIONS,
                          headers=[("number", b"%d" % number)])  # fmt: skip


def ends(appliance: EmbeddedAppliance, topic: str) -> int:
    with Admin(appliance.address) as admin:
        found = admin.describe_topics(topic)[topic]["partitions"]
        return sum(each["end_offset"] for each in found)


def read(appliance: EmbeddedAppliance, topic: str, count: int) -> dict[int, list[Any]]:
    """(key, value, headers, timestamp) of each record, by partition."""
    found: dict[int, list[Any]] = {each: [] for each in range(PARTITIONS)}
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        while sum(map(len, found.values())) < count:
            some = consumer.poll(timeout_ms=60_000)
            assert some, {each: len(rows) for each, rows in found.items()}
            for record in some:
                row = record.key, record.value, record.headers, record.timestamp
                found[record.partition].append(row)
        assert not consumer.poll(timeout_ms=300)
    return found


def test_topics_settings_and_groups_are_mirrored_exactly_once(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path
) -> None:
    jars = engine_jars()
    there = start_embedded(settings=SETTINGS)
    try:
        run(appliance, there, gateway, jars, tmp_path)
    finally:
        there.stop()


def mirror_properties(gateway: str, target: str, directory: pathlib.Path) -> str:
    """The path of a configuration that mirrors one topic and its group, exactly once."""
    properties = {
        "clusters": "here, there",
        "here.bootstrap.servers": gateway,
        "there.bootstrap.servers": target,
        "here->there.enabled": "true",
        "here->there.topics": "mirrored",
        "here->there.groups": "readers",
        "here->there.emit.checkpoints.interval.seconds": 1,
        "here->there.sync.group.offsets.enabled": "true",
        "here->there.sync.group.offsets.interval.seconds": 1,
        "here->there.sync.topic.configs.interval.seconds": 1,
        "here->there.refresh.topics.interval.seconds": 1,
        "here->there.refresh.groups.interval.seconds": 1,
        "here->there.offset.lag.max": 0,
        "here->there.producer.override.batch.size": 2000,
        "replication.factor": 1,
        "checkpoints.topic.replication.factor": 1,
        "heartbeats.topic.replication.factor": 1,
        "offset-syncs.topic.replication.factor": 1,
        "offset.storage.replication.factor": 1,
        "status.storage.replication.factor": 1,
        "config.storage.replication.factor": 1,
        "there.exactly.once.source.support": "enabled",
        "dedicated.mode.enable.internal.rest": "true",
        "listeners": f"http://127.0.0.1:{free_port()}",
        "there.consumer.isolation.level": "read_committed",
        "here.consumer.isolation.level": "read_committed",
        "session.timeout.ms": 6000,
        "heartbeat.interval.ms": 1000,
        "scheduled.rebalance.max.delay.ms": 1000,
    }
    path = directory / "mirror.properties"
    path.write_text("".join(f"{name} = {value}\n" for name, value in properties.items()))
    return str(path)


def run(
    here: EmbeddedAppliance,
    there: EmbeddedAppliance,
    gateway: str,
    jars: str,
    directory: pathlib.Path,
) -> None:
    path = mirror_properties(gateway, there.kafka_addresses[0], directory)

    def start() -> Program:
        main = "org.apache.kafka.connect.mirror.MirrorMaker"
        return Program(java_command(jars, main, path, heap="400m"), directory)

    with Admin(here.address) as admin:
        admin.create_topics(
            [NewTopic("mirrored", PARTITIONS, configs={"retention.ms": 777_000_000})]
        )
    write(here, 0)
    with Admin(there.address) as admin:

        def is_there() -> bool:
            return "here.mirrored" in admin.list_topics()

        with start() as program:
            wait_until(lambda: is_there() and ends(there, "here.mirrored") > 0, "it mirrors")
            program.kill()
        write(here, RECORDS)
        with start() as program:
            wait_until(lambda: ends(there, "here.mirrored") > RECORDS, "it goes on")
            for victim in ("tr-worker-0", "tr-groups-0"):
                kill_and_wait_for_successor(there, victim)
            write(here, 2 * RECORDS)
            assert read(there, "here.mirrored", 3 * RECORDS) == read(here, "mirrored", 3 * RECORDS)
            wait_until(
                lambda: (
                    admin.describe_topics("here.mirrored")["here.mirrored"]["configs"][
                        "retention.ms"
                    ]
                    == 777_000_000
                ),
                "the settings of the topic are mirrored",
            )
            with Consumer(
                "mirrored", bootstrap=here.address, group_id="readers", auto_offset_reset="earliest"
            ) as consumer:
                count = 0
                while count < 3 * RECORDS:
                    count += len(consumer.poll(timeout_ms=60_000))
                consumer.commit()

            def are_synced() -> bool:
                if "readers" not in admin.list_groups():
                    return False
                found = admin.list_group_offsets("readers")
                return len(found) == PARTITIONS

            wait_until(are_synced, "the offsets of the group are mirrored")
            program.kill()  # its shutdown may hang in its own HTTP server
