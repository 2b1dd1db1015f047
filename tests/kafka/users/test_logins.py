"""Kafka clients log in with a password, by each mechanism, and lose it with their user."""

from __future__ import annotations

import asyncio
import base64
import pathlib
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiokafka
import confluent_kafka
import kafka
import kafka.errors
import pytest
from confluent_kafka.admin import AdminClient

from shm.rights.passwords import fields_of
from tailrace import NewTopic
from tests.kit.appliances.secured import Users, secured
from tests.kit.peers.kafka_logins import (
    MATRIX,
    MECHANISMS,
    PASSWORD,
    add,
    has_ended,
    kafka_python,
    librdkafka,
)
from tests.kit.peers.raw_kafka import RawKafka, kill_gateway
from tests.kit.processes import HANG_LIMIT_S, wait_until

HANDSHAKE, AUTHENTICATE, METADATA, VERSIONS = 17, 36, 3, 18
SETTINGS = {"kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true"}


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    with secured(tmp_path_factory.mktemp("logins"), **SETTINGS) as found:
        found.admin.create_topics(NewTopic("orders", partitions=2))
        everything = ("write topic orders", "read topic orders", "read group g.")
        add(found, "shop", *everything, "idempotent-write cluster")
        yield found


def send(configuration: dict[str, Any], **changed: Any) -> Any:
    """Send a record; its error, or None."""
    results: list[Any] = []
    producer = confluent_kafka.Producer({**configuration, **changed})
    producer.produce(
        "orders", b"x", partition=0, on_delivery=lambda error, _: results.append(error)
    )
    assert producer.flush(HANG_LIMIT_S) == 0
    return results[0]


def failed_login(users: Users, user: str, mechanism: str, **changed: Any) -> str:
    """The reason that a client is told which is not let in."""
    told: list[str] = []
    configuration = librdkafka(
        users, user, mechanism, error_cb=lambda error: told.append(error.str()), **changed
    )
    client = AdminClient(configuration)
    wait_until(lambda: client.poll(0.1) >= 0 and bool(told), "the client is told")
    return told[0]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_librdkafka_logs_in_writes_and_reads(users: Users, mechanism: str) -> None:
    configuration = librdkafka(users, "shop", mechanism)
    assert send(configuration, **{"enable.idempotence": True}) is None
    consumer = confluent_kafka.Consumer(
        {**configuration, "group.id": f"g.{mechanism}", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["orders"])
    found: list[Any] = []

    def has_read() -> bool:
        message = consumer.poll(1)
        if message is not None:
            assert message.error() is None
            found.append(message.value())
        return bool(found)

    wait_until(has_read, "a record is read")
    consumer.close()


@pytest.mark.parametrize("mechanism", MATRIX)
def test_kafka_python_logs_in(users: Users, mechanism: str) -> None:
    producer = kafka.KafkaProducer(**kafka_python(users, "shop", mechanism))
    assert producer.send("orders", b"x", partition=0).get(HANG_LIMIT_S).offset >= 0
    producer.close()


def test_aiokafka_logs_in(users: Users) -> None:
    async def write() -> int:
        producer = aiokafka.AIOKafkaProducer(**kafka_python(users, "shop", "SCRAM-SHA-512"))
        await producer.start()
        try:
            return int((await producer.send_and_wait("orders", b"x", partition=0)).offset)
        finally:
            await producer.stop()

    assert asyncio.run(write()) >= 0


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_wrong_password_and_an_unknown_user_are_told_alike(users: Users, mechanism: str) -> None:
    wrong = failed_login(users, "shop", mechanism, **{"sasl.password": "wrong"})
    unknown = failed_login(users, "nobody", mechanism)
    for told in (wrong, unknown):
        assert "the user is unknown or the password is wrong" in told


def test_a_mechanism_that_is_not_offered_is_named(users: Users) -> None:
    with RawKafka(users.appliance.kafka_addresses[0]) as client:
        begun = time.monotonic()
        answer = client.ask(HANDSHAKE, 1, {"mechanism": "GSSAPI"})
        assert time.monotonic() - begun >= 0.1, "as after a wrong password"
        assert answer["error_code"] == 33
        assert set(answer["mechanisms"]) == set(MECHANISMS)
        assert client.receive_bytes() is None


def plain(client: RawKafka, user: str = "shop", password: str = PASSWORD) -> dict[str, Any]:
    assert client.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"})["error_code"] == 0
    token = f"\0{user}\0{password}".encode()
    return client.ask(AUTHENTICATE, 2, {"auth_bytes": token})


def test_before_the_login_there_are_the_requests_of_a_login_alone(users: Users) -> None:
    address = users.appliance.kafka_addresses[0]
    with RawKafka(address) as client:
        assert client.ask(VERSIONS, 0, {})["error_code"] == 0
        client.send(METADATA, 9, {"topics": None})
        assert client.receive_bytes() is None
    with RawKafka(address) as client:
        answer = client.ask(AUTHENTICATE, 2, {"auth_bytes": b"\0shop\0correct horse"})
        assert answer["error_code"] == 34
        assert client.receive_bytes() is None
    with RawKafka(address) as client:
        client.send_bytes(struct.pack(">i", 100_000) + bytes(100))
        assert client.receive_bytes() is None, "a large request before the login"
    for token in (b"", b"shop", b"\0shop", b"other\0shop\0correct horse", b"\0\xff\0x", bytes(9)):
        with RawKafka(address) as client:
            client.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"})
            answer = client.ask(AUTHENTICATE, 2, {"auth_bytes": token})
            assert (answer["error_code"], answer["auth_bytes"]) == (58, b"")
            assert client.receive_bytes() is None


def test_tokens_without_frames_log_in_as_old_clients_do(users: Users) -> None:
    with RawKafka(users.appliance.kafka_addresses[0]) as client:
        assert client.ask(HANDSHAKE, 0, {"mechanism": "PLAIN"})["error_code"] == 0
        token = f"\0shop\0{PASSWORD}".encode()
        client.send_bytes(struct.pack(">i", len(token)) + token)
        assert client.receive_bytes() == b""
        topics = client.ask(METADATA, 9, {"topics": None})["topics"]
        assert [topic["name"] for topic in topics] == ["orders"]
    with RawKafka(users.appliance.kafka_addresses[0]) as client:
        client.ask(HANDSHAKE, 0, {"mechanism": "PLAIN"})
        client.send_bytes(struct.pack(">i", 4) + b"\0a\0b")
        assert client.receive_bytes() is None


@pytest.mark.parametrize("size", [0, 4, 7])
def test_a_request_without_a_header_behind_a_token_ends_its_connection_alone(
    users: Users, size: int
) -> None:
    address = users.appliance.kafka_addresses[0]
    with RawKafka(address) as other, RawKafka(address) as client:
        assert plain(other)["error_code"] == 0
        assert client.ask(HANDSHAKE, 0, {"mechanism": "PLAIN"})["error_code"] == 0
        token = f"\0shop\0{PASSWORD}".encode()
        client.send_bytes(
            struct.pack(">i", len(token)) + token + struct.pack(">i", size) + bytes(size)
        )
        while client.receive_bytes() is not None:
            pass
        assert other.ask(METADATA, 9, {"topics": None})["topics"], "the gateway lives"


def test_a_burst_of_logins_waits_and_none_is_told_that_it_failed(users: Users) -> None:
    add(users, "bursting")
    token = f"\0bursting\0{PASSWORD}".encode()
    clients = [RawKafka(users.appliance.kafka_addresses[0]) for _ in range(100)]
    try:
        for client in clients:
            assert client.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"})["error_code"] == 0
        for client in clients:
            client.send(AUTHENTICATE, 2, {"auth_bytes": token})
        found = [client.receive(AUTHENTICATE, 2)[1]["error_code"] for client in clients]
        assert found == [0] * len(clients)
    finally:
        for client in clients:
            client.close()


def test_a_connection_logs_in_again_as_the_same_user_alone(users: Users) -> None:
    add(users, "second")
    with RawKafka(users.appliance.kafka_addresses[0]) as client:
        assert plain(client)["error_code"] == 0
        assert client.ask(METADATA, 9, {"topics": None})["topics"]
        assert plain(client)["error_code"] == 0
        assert client.ask(METADATA, 9, {"topics": None})["topics"]
        answer = plain(client, "second")
        assert answer["error_code"] == 58
        assert "belongs to user 'shop'" in answer["error_message"]
        assert client.receive_bytes() is None


def test_disabled_deleted_and_changed_users_lose_their_connections(users: Users) -> None:
    address = users.appliance.kafka_addresses[0]
    ends: dict[str, Callable[[str], object]] = {
        "disabled": lambda name: users.admin.disable_user(name),
        "deleted": lambda name: users.admin.delete_user(name),
        "changed": lambda name: users.admin.alter_user(name, **fields_of("another password")),
        "removed": lambda name: users.admin.alter_user(
            name, password_hash="", scram_credentials=[]
        ),
    }
    for name, end in ends.items():
        add(users, name, "read topic orders")
        with RawKafka(address) as client, RawKafka(address) as other:
            assert plain(client, name)["error_code"] == 0
            assert plain(other)["error_code"] == 0
            assert client.ask(METADATA, 9, {"topics": None})["topics"]
            other.ask(METADATA, 9, {"topics": None})
            end(name)
            assert client.receive_bytes() is None, "an idle connection is closed"
            assert other.ask(METADATA, 9, {"topics": None})["topics"]
        with RawKafka(address) as client:
            answer = plain(client, name)
            assert answer["error_code"] == 58
            assert ("is disabled" in answer["error_message"]) is (name == "disabled")


def test_a_producer_whose_user_is_disabled_in_flight_is_refused(users: Users) -> None:
    add(users, "passing", "write topic orders")
    results: list[Any] = []
    producer = confluent_kafka.Producer(
        {**librdkafka(users, "passing"), "message.timeout.ms": 4_000, "linger.ms": 0}
    )

    def note(error: Any, _message: Any) -> None:
        results.append(error)

    producer.produce("orders", b"first", partition=1, on_delivery=note)
    assert producer.flush(HANG_LIMIT_S) == 0
    assert results == [None]
    users.admin.disable_user("passing")
    producer.produce("orders", b"second", partition=1, on_delivery=note)
    assert producer.flush(HANG_LIMIT_S) == 0
    assert results[1] is not None
    users.admin.enable_user("passing")
    assert send(librdkafka(users, "passing")) is None


def test_users_log_in_again_after_a_restart_of_the_gateway(users: Users) -> None:
    producer = confluent_kafka.Producer(librdkafka(users, "shop"))
    producer.produce("orders", b"x", partition=0)
    assert producer.flush(HANG_LIMIT_S) == 0
    kill_gateway(users.appliance)
    producer.produce("orders", b"y", partition=0)
    assert producer.flush(HANG_LIMIT_S) == 0


def test_a_login_has_an_end_where_the_operator_wants_it(tmp_path: pathlib.Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "kafka.connections.max.reauth.ms": 1_500}
    with secured(tmp_path, **settings) as users:
        users.admin.create_topics(NewTopic("orders"))
        add(users, "shop", "write topic orders")
        with RawKafka(users.appliance.kafka_addresses[0]) as client:
            assert plain(client)["session_lifetime_ms"] == 1_500

            wait_until(lambda: has_ended(client), "the login's time is over")
        producer = confluent_kafka.Producer(librdkafka(users, "shop"))
        results: list[Any] = []

        begun = time.monotonic()

        def is_older_than_a_login() -> bool:
            producer.produce("orders", b"x", on_delivery=lambda error, _: results.append(error))
            producer.flush(HANG_LIMIT_S)
            return time.monotonic() - begun > 2

        wait_until(is_older_than_a_login, "records are sent before and after another login")
        assert set(results) == {None}


def test_passwords_are_not_read_on_a_connection_without_encryption(tmp_path: pathlib.Path) -> None:
    with secured(tmp_path, **{"kafka.listen": "127.0.0.1:0"}) as users:
        add(users, "shop")
        with RawKafka(users.appliance.kafka_addresses[0]) as client:
            answer = client.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"})
            assert answer["error_code"] == 33
            assert answer["mechanisms"] == ["SCRAM-SHA-512", "SCRAM-SHA-256"]


def test_a_client_cannot_log_in_where_there_are_no_users(appliance: Any, gateway: str) -> None:
    with RawKafka(gateway) as client:
        answer = client.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"})
        assert answer["error_code"] == 34
        assert client.receive_bytes() is None


def test_the_salt_of_an_unknown_user_survives_the_gateway(users: Users) -> None:
    def salt() -> bytes:
        with RawKafka(users.appliance.kafka_addresses[0]) as client:
            client.ask(HANDSHAKE, 1, {"mechanism": "SCRAM-SHA-256"})
            answer = client.ask(AUTHENTICATE, 2, {"auth_bytes": b"n,,n=nobody,r=abc"})
            return base64.b64decode(bytes(answer["auth_bytes"]).split(b",s=")[1].split(b",")[0])

    before = salt()
    kill_gateway(users.appliance)
    assert salt() == before
