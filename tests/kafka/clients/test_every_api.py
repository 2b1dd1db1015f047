"""Every API of the gateway's table is asked by a client that exists, and answers it."""

from __future__ import annotations

import pathlib
import time
import urllib.request
import warnings

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, ConfigResource
from prometheus_client.parser import text_string_to_metric_families

from appliance.observe.console.access.scraper_tokens import METRICS, add_token
from shm.messages.kafka_names import API_NAMES
from shm.rights.passwords import fields_of
from tailrace import NewTopic
from tests.kafka.clients.programs import SOURCES, Program, engine_jars, java_command
from tests.kit.appliances.console import console_of
from tests.kit.appliances.secured import Users, secured
from tests.kit.processes import HANG_LIMIT_S

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("a Java machine starts and calls some fifty operations"),
]
PASSWORD = "correct horse"
REFUSED = {
    "updateFeatures": "InvalidUpdateVersionException",
}
"""Steps whose answer is a refusal, as docs/kafka.md says."""


def properties(users: Users, separator: str) -> dict[str, str]:
    return {
        "bootstrap.servers": users.appliance.kafka_addresses[0],
        "security.protocol": "SASL_PLAINTEXT", f"sasl{separator}mechanism": "PLAIN",
    }  # fmt: skip


def use_java(users: Users, directory: pathlib.Path) -> dict[str, str]:
    """Run `EveryApi`; its steps with their outcomes."""
    path = directory / "client.properties"
    lines = [f"{name}={value}" for name, value in properties(users, ".").items()]
    lines.append(
        "sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required "
        f'username="chief" password="{PASSWORD}";'
    )
    path.write_text("\n".join(lines))
    source = str(SOURCES / "java" / "EveryApi.java")
    command = java_command(engine_jars(), source, str(path), users.appliance.data_dir)
    with Program(command, directory) as program:
        program.result()
        steps = (line.split(" ", 1) for line in program.lines("STEP "))
        return dict(steps)


def use_librdkafka(users: Users) -> None:
    """Ask by librdkafka what Java's present clients do not ask any more."""
    common = {
        **properties(users, "."), "sasl.username": "chief", "sasl.password": PASSWORD
    }  # fmt: skip
    producer = confluent_kafka.Producer({**common, "transactional.id": "rdkafka"})
    producer.init_transactions(HANG_LIMIT_S)
    producer.begin_transaction()
    producer.produce("older", b"x", partition=0)
    place = confluent_kafka.TopicPartition("older", 0, 1)
    group = confluent_kafka.Consumer({**common, "group.id": "rdkafka"}).consumer_group_metadata()
    producer.send_offsets_to_transaction([place], group, HANG_LIMIT_S)
    producer.commit_transaction(HANG_LIMIT_S)
    resource = ConfigResource(ConfigResource.Type.TOPIC, "older", {"retention.ms": "3600000"})
    admin = AdminClient(common)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        (done,) = admin.alter_configs([resource]).values()
    done.result(HANG_LIMIT_S)


def asked(users: Users) -> set[str]:
    """The APIs that the gateway has answered, from /metrics."""
    token = add_token(users.appliance.data_dir, "test", METRICS, 0, time.time_ns() // 1_000)
    request = urllib.request.Request(
        console_of(users.appliance) + "/metrics", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=HANG_LIMIT_S) as answer:
        text = answer.read().decode()
    return {
        sample.labels["api"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "tailrace_kafka_requests_total" and sample.value
    }


def test_every_api_is_asked_by_a_client_of_kafkas_world(tmp_path: pathlib.Path) -> None:
    given = {
        "kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true",
        "http.listen": "127.0.0.1:0",
    }  # fmt: skip
    with secured(tmp_path, **given) as users:
        users.admin.create_topics([NewTopic("older", 1)])
        users.add("chief", admin=True, **fields_of(PASSWORD))
        outcomes = use_java(users, tmp_path)
        refused = {name: text for name, text in outcomes.items() if text != "ok"}
        assert refused.keys() == REFUSED.keys(), refused
        for name, kind in REFUSED.items():
            assert kind in refused[name]
        use_librdkafka(users)
        assert set(API_NAMES.values()) - asked(users) == set()
