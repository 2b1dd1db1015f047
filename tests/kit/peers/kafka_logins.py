"""Users with passwords, and how each Kafka client logs in as one."""

from __future__ import annotations

from typing import Any

import pytest

from shm.rights.passwords import fields_of
from tests.kit.appliances.secured import Users
from tests.kit.peers.raw_kafka import RawKafka

PASSWORD = "correct horse"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
MATRIX = ("SCRAM-SHA-512", *(pytest.param(name, marks=pytest.mark.long) for name in MECHANISMS[:2]))
"""The mechanisms as parameters: one of them belongs to the plain suite."""


def add(users: Users, name: str, *allowed: str, **fields: Any) -> None:
    """Add a user with PASSWORD, who is allowed all of this (see `Users.add`)."""
    users.add(name, *allowed, **fields_of(PASSWORD), **fields)


def librdkafka(
    users: Users, user: str, mechanism: str = "SCRAM-SHA-256", **changed: Any
) -> dict[str, Any]:
    """The configuration of a confluent-kafka client."""
    return {
        "bootstrap.servers": users.appliance.kafka_addresses[0],
        "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": mechanism,
        "sasl.username": user, "sasl.password": PASSWORD, "logger": _SILENT, **changed,
    }  # fmt: skip


def kafka_python(users: Users, user: str, mechanism: str = "SCRAM-SHA-256") -> dict[str, Any]:
    """The configuration of a kafka-python or aiokafka client."""
    return {
        "bootstrap_servers": users.appliance.kafka_addresses[0],
        "security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": mechanism,
        "sasl_plain_username": user, "sasl_plain_password": PASSWORD,
    }  # fmt: skip


def connect(users: Users, user: str) -> RawKafka:
    """A connection of a user that has logged in."""
    client = RawKafka(users.appliance.kafka_addresses[0])
    assert client.ask(17, 1, {"mechanism": "PLAIN"})["error_code"] == 0
    token = f"\0{user}\0{PASSWORD}".encode()
    assert client.ask(36, 2, {"auth_bytes": token})["error_code"] == 0
    return client


def has_ended(client: RawKafka) -> bool:
    """True if the gateway has closed a connection, since its login is over."""
    try:
        client.send(3, 9, {"topics": None})
        return client.receive_bytes() is None
    except ConnectionError:
        return True


class _Silent:
    def log(self, *_arguments: object, **_fields: object) -> None:
        """Keep librdkafka's lines about refusals out of the tests' output."""

    def __getattr__(self, _name: str) -> Any:
        return self.log


_SILENT = _Silent()
