"""Java's clients log in with a token of an identity provider (OAUTHBEARER)."""

from __future__ import annotations

import pathlib

import pytest

from tailrace import NewTopic
from tests.kafka.clients.programs import Program, engine_jars, java_command
from tests.kit.appliances.secured import secured
from tests.kit.peers.bearer_tokens import Provider, token_settings, write_keys


@pytest.mark.long
@pytest.mark.slow_because("two Java machines start")
def test_java_writes_and_reads(tmp_path: pathlib.Path) -> None:
    provider = Provider()
    path = write_keys(tmp_path / "keys.json", provider.public())
    with secured(tmp_path, **token_settings(path)) as users:
        users.admin.create_topics(NewTopic("orders", partitions=2))
        users.add("shop", "write topic orders", "read topic orders", "read group g.")
        write_and_read(users.appliance.kafka_addresses[0], provider, tmp_path)


def write_and_read(address: str, provider: Provider, tmp_path: pathlib.Path) -> None:
    jars = engine_jars()
    token = tmp_path / "token.jwt"
    token.write_text(provider.token())
    properties = tmp_path / "client.properties"
    properties.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=OAUTHBEARER\n"
        f"sasl.oauthbearer.token.endpoint.url=file://{token}\n"
        "sasl.jaas.config=org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule "
        "required;\n"
        "sasl.login.callback.handler.class="
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler\n"
        "allow.auto.create.topics=false\n"
    )
    allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls=file://{token}"

    def run(name: str, *arguments: str) -> str:
        command = java_command(
            jars, f"org.apache.kafka.tools.{name}", "--bootstrap-server", address,
            "--topic", "orders", "--command-config", str(properties), *arguments,
        )  # fmt: skip
        with Program(command, tmp_path, {"JAVA_TOOL_OPTIONS": allowed}) as program:
            return program.result()

    count = ("--num-records", "2000", "--record-size", "100", "--throughput", "-1")
    assert "2000 records sent" in run("ProducerPerformance", *count)
    read = run(
        "consumer.ConsoleConsumer", "--group", "g.java", "--from-beginning", "--max-messages", "5",
        "--timeout-ms", "60000",
    )  # fmt: skip
    assert "Processed a total of 5 messages" in read
