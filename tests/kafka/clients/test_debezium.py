"""Debezium's connector for PostgreSQL in Kafka Connect: a table and its changes, through kills."""

from __future__ import annotations

import collections
import glob
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer

from bench.peers.kafka import fetch_jars
from bench.peers.servers import Missing
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kafka.clients.programs import SOURCES, Program, engine_jars, java_command
from tests.kit.hosts.ports import free_port
from tests.kit.peers.raw_kafka import kill_gateway
from tests.kit.processes import HANG_LIMIT_S

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("Java machines start, and a database"),
]
TOPIC = "pg.public.orders"
TOMBSTONE = "tombstone"


class Postgres:
    """A server of its own, with one table."""

    def __init__(self, binaries: str, directory: str) -> None:
        self.port = free_port()
        self._binaries, self._directory = binaries, directory
        # it refuses to run as root
        self._as: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []}
        if os.geteuid():
            self._as = {}
        else:
            shutil.chown(directory, "postgres", "postgres")
        self._run("initdb", "-D", f"{directory}/db", "-A", "trust", "-U", "postgres")
        settings = (
            f"-p {self.port} -k {directory} -c wal_level=logical -c listen_addresses=127.0.0.1"
        )
        self._run(
            "pg_ctl",
            "-D",
            f"{directory}/db",
            "-l",
            f"{directory}/log",
            "-w",
            "-o",
            settings,
            "start",
        )

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [f"{self._binaries}/{name}", *arguments], check=False, cwd=self._directory,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=HANG_LIMIT_S, **self._as,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()

    def sql(self, text: str) -> None:
        """Run statements."""
        self._run(
            "psql", "-q", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-c", text
        )

    def stop(self) -> None:
        self._run("pg_ctl", "-D", f"{self._directory}/db", "-m", "immediate", "stop")


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    found = shutil.which("initdb") or next(
        iter(sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), reverse=True)), None
    )
    if found is None:
        pytest.skip("PostgreSQL is missing (Debian: apt-get install postgresql)")
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as directory:
        server = Postgres(os.path.dirname(os.path.realpath(found)), directory)
        try:
            yield server
        finally:
            server.stop()


def plugins() -> str:
    """The directory of the connector. Skips without it."""
    try:
        jars = fetch_jars("debezium-3.6.1", str(SOURCES / "debezium" / "pom.xml"))
    except Missing as error:
        pytest.skip(str(error))
    return os.path.dirname(jars)


def write_properties(path: pathlib.Path, **values: object) -> str:
    path.write_text("".join(f"{key.replace('_', '.')}={value}\n" for key, value in values.items()))
    return str(path)


def read(gateway: str, count: int, key_count: int = 0) -> collections.Counter[str]:
    """The kinds of the first changes: at least so many, of at least so many rows."""
    consumer = Consumer({
        "bootstrap.servers": gateway, "group.id": f"reader-{count}-{key_count}",
        "auto.offset.reset": "earliest",
    })  # fmt: skip
    consumer.subscribe([TOPIC])
    kinds: collections.Counter[str] = collections.Counter()
    keys: set[bytes] = set()
    until = time.monotonic() + HANG_LIMIT_S
    while kinds.total() < count or len(keys) < key_count:
        assert time.monotonic() < until, f"of {count} changes of {key_count} rows came {kinds}"
        message = consumer.poll(1)
        if message is None or message.error():
            continue  # the topic is made with its first record
        key, value = message.key(), message.value()
        assert isinstance(key, bytes)
        keys.add(key)
        kinds[TOMBSTONE if value is None else str(json.loads(value)["op"])] += 1
    consumer.close()
    return kinds


def test_rows_and_changes_of_a_table_arrive_through_kills(
    appliance: EmbeddedAppliance, gateway: str, postgres: Postgres, tmp_path: pathlib.Path
) -> None:
    jars, directory = engine_jars(), plugins()
    postgres.sql(
        "create table orders(id int primary key, what text);"
        "insert into orders select g, 'w' || g from generate_series(1, 100) g"
    )
    json_converter = "org.apache.kafka.connect.json.JsonConverter"
    worker = write_properties(
        tmp_path / "worker.properties", bootstrap_servers=gateway, key_converter=json_converter,
        value_converter=json_converter, key_converter_schemas_enable="false",
        value_converter_schemas_enable="false", offset_flush_interval_ms=200,
        offset_storage_file_filename=tmp_path / "offsets",
        listeners=f"http://127.0.0.1:{free_port()}", plugin_path=directory,
    )  # fmt: skip
    connector = write_properties(
        tmp_path / "connector.properties", name="pg", plugin_name="pgoutput", slot_name="orders",
        connector_class="io.debezium.connector.postgresql.PostgresConnector",
        database_hostname="127.0.0.1", database_port=postgres.port, database_user="postgres",
        database_password="none", database_dbname="postgres", topic_prefix="pg",
        table_include_list="public.orders",
    )  # fmt: skip
    main = "org.apache.kafka.connect.cli.ConnectStandalone"
    command = java_command(jars, main, worker, connector, heap="400m")
    with Program(command, tmp_path):
        assert read(gateway, 100) == {"r": 100}
        postgres.sql(
            "insert into orders select g, 'n' || g from generate_series(101, 150) g;"
            "update orders set what = 'u' where id <= 10; delete from orders where id = 5"
        )
        changed = {"r": 100, "c": 50, "u": 10, "d": 1, TOMBSTONE: 1}
        assert read(gateway, 162) == changed
        kill_gateway(appliance)
        postgres.sql("insert into orders select g, 'n' || g from generate_series(151, 200) g")
        assert read(gateway, 212) == {**changed, "c": 100}
    postgres.sql("insert into orders select g, 'n' || g from generate_series(201, 220) g")
    with Program(command, tmp_path):
        kinds = read(
            gateway, 232, 220
        )  # it may repeat changes behind the offset that it has stored
        assert kinds["r"] == 100, "the table is not read again"
