"""`tailrace migrate` logs in to the cluster with the properties that it is given."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tailrace import Consumer, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import start_embedded
from tests.kit import cli
from tests.kit.appliances.secured import Users, admin_address, secured
from tests.kit.peers.kafka_logins import PASSWORD, add

SETTINGS = {"kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true"}


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    with secured(tmp_path_factory.mktemp("migrate"), **SETTINGS) as found:
        found.admin.create_topics(NewTopic("orders", partitions=2))
        add(found, "mover", "read topic orders", "describe-configs topic orders")
        yield found


def properties(path: pathlib.Path, password: str) -> str:
    path.write_text(
        "# the mover\nsecurity.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-512\n"
        f"sasl.username = mover\nsasl.password={password}\n"
    )
    return str(path)


def test_properties_of_a_file_log_in(users: Users, tmp_path: pathlib.Path) -> None:
    with Producer(admin_address(users.appliance)) as producer:
        for n in range(30):
            producer.send("orders", b"%d" % n, partition=n % 2)
    address = f"kafka:{users.appliance.kafka_addresses[0]}"
    arguments = ("migrate", "--from", address, "--topics", "orders", "--groups", "none")
    target = start_embedded(auto_create_topics=False)
    try:
        wrong = cli.run(
            target, *arguments, "--kafka-config", properties(tmp_path / "wrong", "wrong"), status=1
        )
        assert b"refuses the connection: " in wrong.stderr
        assert b"uthentication failed" in wrong.stderr
        assert b"--kafka-config" in wrong.stderr
        without = cli.run(target, *arguments, status=1)
        assert b"If it needs SASL or TLS, give --kafka-config" in without.stderr
        right = properties(tmp_path / "right", PASSWORD)
        cli.run(target, *arguments, "--kafka-config", right)
        with Consumer(bootstrap=target.address) as consumer:
            ends = consumer.end_offsets([TopicPartition("orders", 0), TopicPartition("orders", 1)])
        assert list(ends.values()) == [15, 15]
        assert (
            PASSWORD.encode()
            not in cli.run(
                target, "consume", "migrate.default.journal", "--from-beginning", "--max", "2"
            ).stdout
        )
    finally:
        target.stop()


def test_java_options_are_explained(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "java.properties"
    path.write_text("sasl.jaas.config=org.apache...\n")
    done = cli.run(
        None, "migrate", "--from", "kafka:127.0.0.1:9", "--topics", "x", "--kafka-config",
        str(path), status=1,
    )  # fmt: skip
    assert b"sasl.username" in done.stderr
