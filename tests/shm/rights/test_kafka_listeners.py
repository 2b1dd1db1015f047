"""Listeners of the Kafka port: protocols, and what clients of each are told."""

from __future__ import annotations

import pytest

from shm.rights.kafka_listeners import (
    PLAINTEXT,
    SASL_PLAINTEXT,
    SASL_SSL,
    SSL,
    advertised_for,
    kafka_listener,
)


@pytest.mark.parametrize(
    ("text", "has_users", "has_certificate", "protocol"),
    [
        ("h:1", False, False, PLAINTEXT), ("h:1", False, True, SSL),
        ("h:1", True, False, SASL_PLAINTEXT), ("h:1", True, True, SASL_SSL),
        ("ssl://h:1", True, True, SSL), ("SASL_SSL://h:1", False, False, SASL_SSL),
        ("PLAINTEXT://h:1", False, True, PLAINTEXT),
    ],
)  # fmt: skip
def test_an_address_speaks_its_protocol(
    text: str, has_users: bool, has_certificate: bool, protocol: str
) -> None:
    found = kafka_listener(text, has_users=has_users, has_certificate=has_certificate)
    assert found == (protocol, "h:1")
    assert found.has_tls is (protocol in (SSL, SASL_SSL))
    assert found.has_sasl is (protocol in (SASL_PLAINTEXT, SASL_SSL))


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="it takes PLAINTEXT, SSL"):
        kafka_listener("TLS://h:1", has_users=False, has_certificate=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""), ("h:1", "h:1"), ("SSL://h:1", ""), ("SSL://h:1, sasl_ssl://[::1]:2", "[::1]:2"),
        ("SSL://h:1,other:3", "other:3"), ("SASL_SSL://h:2,other:3", "h:2"),
    ],
)  # fmt: skip
def test_clients_are_told_the_address_of_their_protocol(text: str, expected: str) -> None:
    assert advertised_for(text, SASL_SSL) == expected
