"""Kafka clients log in with tokens of an identity provider (OAUTHBEARER)."""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import aiokafka
import aiokafka.abc
import confluent_kafka
import kafka
import kafka.net.sasl.oauth
import pytest

from tailrace import NewTopic
from tailrace.embedded_appliance import start_embedded
from tests.kit.appliances.secured import Users, secured
from tests.kit.peers.bearer_tokens import Provider, first_message, token_settings, write_keys
from tests.kit.peers.kafka_logins import PASSWORD, add, has_ended, librdkafka
from tests.kit.peers.raw_kafka import RawKafka, kill_gateway
from tests.kit.processes import HANG_LIMIT_S, children, wait_until

METADATA, HANDSHAKE, AUTHENTICATE = 3, 17, 36


class Place(NamedTuple):
    users: Users
    provider: Provider

    @property
    def address(self) -> str:
        return self.users.appliance.kafka_addresses[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory, provider = tmp_path_factory.mktemp("tokens"), Provider()
    path = write_keys(directory / "keys.json", provider.public())
    with secured(directory, **token_settings(path)) as users:
        users.admin.create_topics(NewTopic("orders", partitions=2))
        add(users, "shop", "write topic orders", "read topic orders", "read group g.")
        yield Place(users, provider)


def log_in(client: RawKafka, token: str, acts_as: str = "") -> dict[str, Any]:
    assert client.ask(HANDSHAKE, 1, {"mechanism": "OAUTHBEARER"})["error_code"] == 0
    return client.ask(AUTHENTICATE, 2, {"auth_bytes": first_message(token, acts_as)})


def by_tokens(place: Place, seconds: float = 600) -> dict[str, Any]:
    """The configuration of a confluent-kafka client."""
    found = librdkafka(place.users, "", "OAUTHBEARER")
    del found["sasl.username"], found["sasl.password"]

    def token(_configuration: str) -> tuple[str, float]:
        return place.provider.token(seconds=seconds), time.time() + seconds

    return {**found, "oauth_cb": token}


def test_a_gateway_loads_what_verifies_tokens_with_the_first_one(place: Place) -> None:
    def has_loaded() -> bool:
        pid = children(place.users.appliance)["tr-kafka-0"]
        return "cryptography" in pathlib.Path(f"/proc/{pid}/maps").read_text()

    kill_gateway(place.users.appliance)
    with RawKafka(place.address) as client:
        assert not has_loaded()
        assert log_in(client, place.provider.token())["error_code"] == 0
        assert has_loaded()


def test_librdkafka_writes_and_reads(place: Place) -> None:
    results: list[Any] = []
    producer = confluent_kafka.Producer(by_tokens(place))
    producer.produce("orders", b"x", on_delivery=lambda error, _: results.append(error))
    assert producer.flush(HANG_LIMIT_S) == 0
    assert results == [None]
    consumer = confluent_kafka.Consumer(
        {**by_tokens(place), "group.id": "g.tokens", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["orders"])

    def has_read() -> bool:
        message = consumer.poll(1)
        return message is not None and message.error() is None

    wait_until(has_read, "a record is read")
    consumer.close()


def test_kafka_python_and_aiokafka_write(place: Place) -> None:
    provider = place.provider

    class Blocking(kafka.net.sasl.oauth.AbstractTokenProvider):
        def token(self) -> str:
            return provider.token()

    class Awaited(aiokafka.abc.AbstractTokenProvider):
        async def token(self) -> str:
            return provider.token()

    common = {
        "bootstrap_servers": place.address, "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "OAUTHBEARER",
    }  # fmt: skip
    producer = kafka.KafkaProducer(**common, sasl_oauth_token_provider=Blocking())
    assert producer.send("orders", b"y").get(HANG_LIMIT_S).offset >= 0
    producer.close()

    async def write() -> int:
        client = aiokafka.AIOKafkaProducer(**common, sasl_oauth_token_provider=Awaited())
        await client.start()
        try:
            return int((await client.send_and_wait("orders", b"z")).offset)
        finally:
            await client.stop()

    assert asyncio.run(write()) >= 0


def test_a_token_must_fit_and_its_user_must_exist(place: Place) -> None:
    provider = place.provider
    for token, acts_as, sentence in (
        (provider.token(aud="payments"), "", "the token is not for 'tailrace'"),
        (provider.token(seconds=-600), "", "the token has expired"),
        (Provider().token(), "", "the signature of the token is wrong"),
        (provider.token("nobody"), "", "there is no user 'nobody'"),
        (provider.token("(appliance)"), "", "there is no user"),
        (provider.token(), "root", "cannot act as another user"),
        ("a.b.c", "", "the token is malformed"),
    ):
        with RawKafka(place.address) as client:
            answer = log_in(client, token, acts_as)
            assert answer["error_code"] == 58
            assert sentence in answer["error_message"]
            assert client.receive_bytes() is None
    with RawKafka(place.address) as client:
        assert log_in(client, provider.token(), "shop")["error_code"] == 0


def test_librdkafka_is_told_the_reason(place: Place) -> None:
    told: list[str] = []
    configuration = {
        **by_tokens(place), "error_cb": lambda error: told.append(error.str()),
        "oauth_cb": lambda _: (place.provider.token("nobody"), time.time() + 60),
    }  # fmt: skip
    producer = confluent_kafka.Producer(configuration)
    wait_until(lambda: producer.poll(0.1) >= 0 and bool(told), "the client is told")
    assert any("there is no user 'nobody'" in text for text in told)


def test_a_session_ends_with_its_token(place: Place) -> None:
    with RawKafka(place.address) as client:
        lifetime_ms = log_in(client, place.provider.token(seconds=-28))["session_lifetime_ms"]
        assert 0 < lifetime_ms <= 2_000, "30 s for clocks that differ"

        wait_until(lambda: has_ended(client), "the token's time is over")


def test_a_connection_takes_a_new_token_of_the_same_user_alone(place: Place) -> None:
    add(place.users, "second")
    with RawKafka(place.address) as client:
        for _ in range(2):
            assert log_in(client, place.provider.token())["error_code"] == 0
            assert client.ask(METADATA, 9, {"topics": None})["topics"]
        answer = log_in(client, place.provider.token("second"))
        assert "belongs to user 'shop'" in answer["error_message"]


def test_a_changed_password_leaves_connections_by_tokens_and_a_disabled_user_ends_them(
    place: Place,
) -> None:
    add(place.users, "leaving", "read topic orders")
    with RawKafka(place.address) as client:
        assert log_in(client, place.provider.token("leaving"))["error_code"] == 0
        assert client.ask(METADATA, 9, {"topics": None})["topics"]
        place.users.admin.alter_user("leaving", password_hash="", scram_credentials=[])
        assert client.ask(METADATA, 9, {"topics": None})["topics"]
        place.users.admin.disable_user("leaving")
        assert client.receive_bytes() is None


def test_tokens_are_taken_after_a_restart_of_the_gateway(place: Place) -> None:
    kill_gateway(place.users.appliance)
    with RawKafka(place.address) as client:
        assert log_in(client, place.provider.token())["error_code"] == 0
        assert plain(place)["error_code"] == 0, "beside passwords"


def plain(place: Place) -> dict[str, Any]:
    with RawKafka(place.address) as client:
        assert client.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"})["error_code"] == 0
        token = f"\0shop\0{PASSWORD}".encode()
        return client.ask(AUTHENTICATE, 2, {"auth_bytes": token})


def test_tokens_are_not_read_on_a_connection_without_encryption(tmp_path: pathlib.Path) -> None:
    path = write_keys(tmp_path / "keys.json", Provider().public())
    given = {**token_settings(path), "kafka.sasl.plain_without_tls": "false"}
    given["kafka.sasl.enabled.mechanisms"] = "OAUTHBEARER,SCRAM-SHA-512"
    with (
        secured(tmp_path, **given) as users,
        RawKafka(users.appliance.kafka_addresses[0]) as client,
    ):
        answer = client.ask(HANDSHAKE, 1, {"mechanism": "OAUTHBEARER"})
        assert (answer["error_code"], answer["mechanisms"]) == (33, ["SCRAM-SHA-512"])


def test_keys_that_cannot_be_used_are_named_at_the_start(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Exception, match=r"none\.json \(kafka\.sasl\.oauthbearer\.jwks\) cannot"):
        start_embedded(
            settings={"security.enabled": "true", **token_settings(str(tmp_path / "none.json"))}
        )
