"""`tailrace migrate` between two houses with users, over TLS, through cuts of the network."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from shm.rights.passwords import fields_of
from tailrace import Admin, NewTopic, Producer, TopicPartition
from tests.kit import cli
from tests.kit.appliances.secured import admin_address, secured
from tests.kit.hosts.certificates import Authority
from tests.kit.hosts.ports import free_port
from tests.kit.hosts.relay import Relay
from tests.kit.processes import HANG_LIMIT_S, wait_until
from tests.system.migrate.houses import rows

PASSWORD = "correct horse"
MOVER = ("read topic orders", "describe-configs topic orders", "describe group readers")


@pytest.mark.long
@pytest.mark.slow_because("librdkafka waits before it connects again")
def test_a_copy_follows_over_tls_through_cuts_and_is_switched(tmp_path: pathlib.Path) -> None:
    authority, port = Authority(tmp_path), free_port()
    certificate, key = authority.sign("broker")
    properties = tmp_path / "mover.properties"
    properties.write_text(
        "security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\nsasl.username=mover\n"
        f"sasl.password={PASSWORD}\nssl.ca.location={authority.path}\n"
        "reconnect.backoff.max.ms=500\n"
    )
    (tmp_path / "to").mkdir()
    with Relay(f"127.0.0.1:{port}") as relay:
        given = {
            "kafka.listen": f"SASL_SSL://127.0.0.1:{port}", "kafka.tls.certificate": certificate,
            "kafka.tls.key": key, "kafka.advertised": relay.address.removeprefix("tcp://"),
        }  # fmt: skip
        with secured(tmp_path, **given) as source, secured(tmp_path / "to") as target:
            source.admin.create_topics([NewTopic("orders", 2)])
            source.add("mover", *MOVER, **fields_of(PASSWORD))
            here, there = admin_address(source.appliance), admin_address(target.appliance)

            def write(first: int) -> None:
                with Producer(here, batch_size=4_096) as producer:
                    for n in range(first, first + 3_000):
                        producer.send("orders", b"value %d" % n, partition=n % 2)

            def is_whole() -> bool:
                with Admin(there) as admin:
                    if "orders" not in admin.list_topics():
                        return False
                return rows(here, "orders", 2) == rows(there, "orders", 2)

            write(0)
            with Admin(here) as admin:
                admin.alter_group_offsets("readers", {TopicPartition("orders", 0): 70})
            command = [
                cli.TAILRACE, "migrate", "--from", f"kafka:{given['kafka.advertised']}", "--topics",
                "orders", "--groups", "readers", "--follow", "--kafka-config", str(properties),
                "--bootstrap", there,
            ]  # fmt: skip
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
                try:
                    for turn in range(1, 3):
                        wait_until(is_whole, "the copy follows")
                        relay.cut()
                        write(3_000 * turn)
                        relay.restore()
                    wait_until(is_whole, "the copy goes on behind the cut")
                    switch = cli.run(None, "migrate", "switch", "--bootstrap", there)
                    assert running.wait(HANG_LIMIT_S) == 1, "the switch ends it"
                finally:
                    running.kill()
                assert running.stderr is not None
                said = running.stderr.read()
            assert b"switched: the lag is zero, 1 group has its offsets" in switch.stderr
            for text in (said, switch.stderr.decode(), switch.stdout.decode()):
                assert PASSWORD not in text
            with Admin(there) as admin:
                found = admin.list_group_offsets("readers")[TopicPartition("orders", 0)]
                assert found is not None
                assert int(found) == 70
