"""The Kafka port over TLS: clients log in, or are the user whom their certificate names."""

from __future__ import annotations

import pathlib
import shutil
import socket
import ssl
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import confluent_kafka
import kafka
import pytest

from netfront.kafka.network.listener import STRANGERS_MAX
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import start_embedded
from tests.kit.appliances.secured import Users, secured
from tests.kit.hosts.certificates import Authority
from tests.kit.peers.kafka_logins import MATRIX, PASSWORD, add, kafka_python, librdkafka
from tests.kit.peers.raw_kafka import RawKafka
from tests.kit.processes import HANG_LIMIT_S, wait_until

METADATA, HANDSHAKE, AUTHENTICATE = 3, 17, 36


class Place(NamedTuple):
    """An appliance with users whose Kafka port has TLS."""

    users: Users
    authority: Authority
    directory: pathlib.Path

    @property
    def address(self) -> str:
        return self.users.appliance.kafka_addresses[0]

    def context(self, user: str = "") -> ssl.SSLContext:
        """The context of a client, with the certificate of a user."""
        context = ssl.create_default_context(cafile=self.authority.path)
        if user:
            context.load_cert_chain(*self.authority.sign(user))
        return context


def settings(directory: pathlib.Path, protocol: str) -> tuple[Authority, dict[str, Any]]:
    authority = Authority(directory)
    certificate, key = authority.sign("broker")
    return authority, {
        "kafka.listen": f"{protocol}://127.0.0.1:0", "kafka.tls.certificate": certificate,
        "kafka.tls.key": key, "kafka.tls.client_ca": authority.path,
    }  # fmt: skip


def place(directory: pathlib.Path, protocol: str) -> Iterator[Place]:
    authority, given = settings(directory, protocol)
    with secured(directory, **given) as users:
        users.admin.create_topics([NewTopic("orders", partitions=2)])
        add(users, "shop", "write topic orders", "read topic orders", "read group g.")
        yield Place(users, authority, directory)


@pytest.fixture(scope="module")
def by_password(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield from place(tmp_path_factory.mktemp("password"), "SASL_SSL")


@pytest.fixture(scope="module")
def by_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield from place(tmp_path_factory.mktemp("certificate"), "SSL")


def send(configuration: dict[str, Any], value: bytes = b"x") -> None:
    results: list[Any] = []
    producer = confluent_kafka.Producer(configuration)
    producer.produce(
        "orders", value, partition=0, on_delivery=lambda error, _: results.append(error)
    )
    assert producer.flush(HANG_LIMIT_S) == 0
    assert results == [None]


def read(configuration: dict[str, Any], group: str, awaited: set[bytes]) -> None:
    """Read from the beginning until all that is awaited has come."""
    consumer = confluent_kafka.Consumer(
        {**configuration, "group.id": f"g.{group}", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["orders"])
    found: set[bytes] = set()

    def has_all() -> bool:
        message = consumer.poll(1)
        if message is not None:
            assert message.error() is None
            found.add(message.value())
        return awaited <= found

    wait_until(has_all, "the records are read")
    consumer.close()


@pytest.mark.parametrize("mechanism", MATRIX)
def test_clients_log_in_on_an_encrypted_connection(by_password: Place, mechanism: str) -> None:
    changed = {"security.protocol": "SASL_SSL", "ssl.ca.location": by_password.authority.path}
    send({**librdkafka(by_password.users, "shop", mechanism), **changed})
    producer = kafka.KafkaProducer(
        **{
            **kafka_python(by_password.users, "shop", mechanism), "security_protocol": "SASL_SSL",
            "ssl_cafile": by_password.authority.path,
        }
    )  # fmt: skip
    assert producer.send("orders", b"y", partition=0).get(HANG_LIMIT_S).offset >= 0
    producer.close()


def test_large_records_pass_in_both_directions(by_password: Place) -> None:
    configuration = {
        **librdkafka(by_password.users, "shop"), "security.protocol": "SASL_SSL",
        "ssl.ca.location": by_password.authority.path, "message.max.bytes": 4_000_000,
    }  # fmt: skip
    values = [bytes([number]) * 900_000 for number in range(5)]
    for value in values:
        send(configuration, value)
    read(configuration, "large", set(values))


def test_a_certificate_says_who_a_client_is(by_certificate: Place) -> None:
    certificate, key = by_certificate.authority.sign("shop")
    base = {
        "bootstrap.servers": by_certificate.address, "security.protocol": "SSL",
        "ssl.ca.location": by_certificate.authority.path, "ssl.certificate.location": certificate,
        "ssl.key.location": key,
    }  # fmt: skip
    send(base, b"by certificate")
    read(base, "certificate", {b"by certificate"})
    producer = kafka.KafkaProducer(
        bootstrap_servers=by_certificate.address, security_protocol="SSL",
        ssl_cafile=by_certificate.authority.path, ssl_certfile=certificate, ssl_keyfile=key,
    )  # fmt: skip
    assert producer.send("orders", b"y", partition=0).get(HANG_LIMIT_S).offset >= 0
    producer.close()


def is_served(address: str, context: ssl.SSLContext | None) -> bool:
    """True if a client gets an answer to Metadata."""
    try:
        with RawKafka(address, context) as client:
            client.send(METADATA, 9, {"topics": None})
            return client.receive_bytes() is not None
    except OSError:
        return False


def test_other_certificates_let_nobody_in(by_certificate: Place, tmp_path: pathlib.Path) -> None:
    assert is_served(by_certificate.address, by_certificate.context("shop"))
    assert not is_served(by_certificate.address, by_certificate.context()), "without one"
    assert not is_served(by_certificate.address, by_certificate.context("nobody"))
    foreign = ssl.create_default_context(cafile=by_certificate.authority.path)
    foreign.load_cert_chain(*Authority(tmp_path).sign("shop"))
    assert not is_served(by_certificate.address, foreign)
    assert not is_served(by_certificate.address, None), "a client without TLS"
    assert is_served(by_certificate.address, by_certificate.context("shop"))


def test_a_user_who_is_disabled_loses_the_connections_of_its_certificate(
    by_certificate: Place,
) -> None:
    add(by_certificate.users, "passing", "describe topic orders")
    context = by_certificate.context("passing")
    with RawKafka(by_certificate.address, context) as client:
        assert client.ask(METADATA, 9, {"topics": None})["topics"]
        by_certificate.users.admin.disable_user("passing")
        assert client.receive_bytes() is None
    assert not is_served(by_certificate.address, context)


def test_tls_and_none_do_not_go_together(by_password: Place, tmp_path: pathlib.Path) -> None:
    with socket.create_connection(split(by_password.address), timeout=HANG_LIMIT_S) as plain:
        plain.sendall(struct.pack(">ihhih", 10, 18, 0, 1, -1))
        end_of(plain)
    with secured(tmp_path, **{"kafka.listen": "127.0.0.1:0"}) as users:
        address = users.appliance.kafka_addresses[0]
        with pytest.raises((ssl.SSLError, OSError)):
            RawKafka(address, by_password.context())


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def end_of(sock: socket.socket) -> None:
    """Read to the end of a connection."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass


def test_half_handshakes_are_bounded_and_keep_nobody_out(by_password: Place) -> None:
    halves = []
    try:
        for number in range(STRANGERS_MAX + 20):
            half = socket.create_connection(split(by_password.address), timeout=HANG_LIMIT_S)
            halves.append(half)
            half.sendall(b"\x16\x03\x01\x02\x00\x01"[: number % 7])
        for half in halves[:10]:
            end_of(half)
        with RawKafka(by_password.address, by_password.context()) as client:
            log_in(client)
            assert client.ask(METADATA, 9, {"topics": None})["topics"]
            for _ in range(STRANGERS_MAX + 20):
                socket.create_connection(split(by_password.address)).close()
            assert client.ask(METADATA, 9, {"topics": None})["topics"], "who is let in stays"
    finally:
        for half in halves:
            half.close()


def log_in(client: RawKafka) -> None:
    assert client.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"})["error_code"] == 0
    token = f"\0shop\0{PASSWORD}".encode()
    assert client.ask(AUTHENTICATE, 2, {"auth_bytes": token})["error_code"] == 0


def test_a_handshake_that_comes_byte_by_byte_is_completed(by_password: Place) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = by_password.context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with socket.create_connection(split(by_password.address), timeout=HANG_LIMIT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                for byte in outgoing.read():
                    sock.sendall(bytes([byte]))
                incoming.write(sock.recv(4096))
        client.write(struct.pack(">ihhih", 10, 18, 0, 1, -1))
        for byte in outgoing.read():
            sock.sendall(bytes([byte]))
        answer = b""
        while len(answer) < 8:
            try:
                answer += client.read(100)
            except ssl.SSLWantReadError:
                incoming.write(sock.recv(4096))
        assert struct.unpack_from(">i", answer, 4)[0] == 1


@pytest.fixture
def alone(tmp_path: pathlib.Path) -> Iterator[Place]:
    yield from place(tmp_path, "SASL_SSL")


def test_certificates_are_read_again_and_open_connections_go_on(alone: Place) -> None:
    other = Authority(alone.directory, "other")
    certificate, key = alone.directory / "broker.pem", alone.directory / "broker.key"
    with RawKafka(alone.address, alone.context()) as client:
        log_in(client)
        certificate.write_bytes(b"damaged")
        alone.users.admin.reload_config()
        assert is_encrypted_by(alone.address, alone.authority), "the former one is in use"
        renewed = other.sign("renewed")
        shutil.copy(renewed[0], certificate)
        shutil.copy(renewed[1], key)
        alone.users.admin.reload_config()
        wait_until(lambda: is_encrypted_by(alone.address, other), "the new one is in use")
        assert not is_encrypted_by(alone.address, alone.authority)
        assert client.ask(METADATA, 9, {"topics": None})["topics"], "the connection goes on"


def is_encrypted_by(address: str, authority: Authority) -> bool:
    """True if the port shows a certificate of the authority."""
    try:
        RawKafka(address, ssl.create_default_context(cafile=authority.path)).close()
    except ssl.SSLCertVerificationError:
        return False
    return True


def test_without_users_tls_can_demand_certificates(tmp_path: pathlib.Path) -> None:
    authority, given = settings(tmp_path, "SSL")
    appliance = start_embedded(settings={**given, "kafka.tls.client_auth": "required"})
    try:
        address = appliance.kafka_addresses[0]
        context = ssl.create_default_context(cafile=authority.path)
        assert not is_served(address, context)
        context.load_cert_chain(*authority.sign("anybody"))
        assert is_served(address, context)
        with Admin(appliance.address) as admin:
            assert admin.list_topics() == []
    finally:
        appliance.stop()


def test_a_certificate_that_cannot_be_used_is_named_at_the_start(tmp_path: pathlib.Path) -> None:
    _, given = settings(tmp_path, "SSL")
    pathlib.Path(given["kafka.tls.key"]).write_bytes(b"no key")
    with pytest.raises(Exception, match=r"kafka\.tls\.key"):
        start_embedded(settings=given)
