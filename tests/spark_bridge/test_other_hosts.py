"""Spark on another host: driver and tasks in a network namespace of their own, which sees the
appliance's address and none of its files.
"""

from __future__ import annotations

import json
import os
import sys

import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded
from tests.kit.hosts.other_hosts import can_be_made, other_host

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.filterwarnings("ignore"),
]
ROWS, VALUE_BYTES = 20_000, 100
PROGRAM = """
import json, os, sys
import spark_bridge
from spark_bridge.session import local_session

address, hidden = sys.argv[1:]
assert os.listdir(hidden) == []
with local_session() as spark:
    def found(frame):
        rows = frame.select("partition", "offset").toArrow()
        return sorted(zip(rows.column("partition").to_pylist(), rows.column("offset").to_pylist()))

    scanned = spark_bridge.scan(spark, "orders", address, tasks=4)
    assert scanned.rdd.getNumPartitions() == 4
    source = spark.read.format("tailrace").option("kafka.bootstrap.servers", address).option("subscribe", "orders").load()
    print(json.dumps([found(scanned), found(source)]))
"""  # noqa: E501


@pytest.mark.skipif(not can_be_made(), reason="this machine makes no network namespace")
def test_executors_without_the_files_read_their_ranges_over_the_network() -> None:
    with other_host() as host:
        running = start_embedded(
            listen=f"tcp://{host.gateway}:0",
            settings={"security.trusted_network": "true"},
            auto_create_topics=False,
        )
        try:
            with Admin(running.address) as admin, Producer(running.address) as producer:
                admin.create_topics([NewTopic("orders", 2)])
                for n in range(ROWS):
                    producer.send("orders", os.urandom(VALUE_BYTES), partition=n % 2)
                producer.flush(60)
            before = host.sent_bytes()
            environment = f"PYTHONPATH={os.getcwd()}"
            command = [
                "env",
                environment,
                sys.executable,
                "-P",
                "-c",
                PROGRAM,
                running.address,
                running.data_dir,
            ]
            done = host.run(command, running.data_dir, timeout_s=200)
            assert done.returncode == 0, done.stderr
            requested = [[partition, offset] for partition in (0, 1) for offset in range(ROWS // 2)]
            assert json.loads(done.stdout.splitlines()[-1]) == [requested, requested]
            assert host.sent_bytes() - before > 2 * ROWS * VALUE_BYTES
        finally:
            running.stop()
