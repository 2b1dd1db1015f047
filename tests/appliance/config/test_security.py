"""Security follows the addresses: on where other hosts reach the appliance, unless its operator
vouches for the network.
"""

from __future__ import annotations

from typing import Any

import pytest

from appliance.config.passwords_in_urls import has_password
from appliance.config.relations import conflicts
from appliance.config.security import is_local
from appliance.config.settings import Settings, definitions
from appliance.config.settings_sources import given_flags, parse_flags, typed
from appliance.config.topology import read_topology
from tailrace.core.errors import InvalidSettingError
from tests.kit.cli import run


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:7420", True), ("tcp://127.9.9.9:1", True), ("tcp://localhost:1", True),
        ("tcp://LOCALHOST:1", True), ("tcp://[::1]:1", True), ("ipc:///run/x.sock", True),
        ("ipc://@x", True), ("tcp://0.0.0.0:1", False), ("tcp://*:1", False),
        ("tcp://[::]:1", False), ("tcp://10.0.0.1:1", False), ("tcp://eth0:1", False),
        ("tcp://localhost.example.com:1", False), ("tcp://example.com:1", False),
    ],
)  # fmt: skip
def test_addresses_that_other_hosts_reach(address: str, expected: bool) -> None:
    assert is_local(address) is expected


NEAR, FAR = ["tcp://127.0.0.1:1", "ipc:///run/x"], ["tcp://127.0.0.1:1", "tcp://0.0.0.0:2"]


@pytest.mark.parametrize(
    ("fields", "secured", "refused"),
    [
        ({"listen": NEAR}, False, ""),
        ({"listen": FAR}, True, ""),
        ({"listen": FAR, "security_trusted_network": True}, False, ""),
        ({"listen": FAR, "security_enabled": "false"}, False, "tcp://0.0.0.0:2, which other hosts"),
        (
            {"listen": FAR, "security_enabled": "false", "security_trusted_network": True},
            False, "",
        ),
        ({"listen": NEAR, "security_enabled": "true"}, True, ""),
        ({"listen": NEAR, "http_listen": "0.0.0.0:7400"}, False, "could read every record"),
        ({"listen": NEAR, "http_listen": "[::]:7400"}, False, "could read every record"),
        ({"listen": NEAR, "http_listen": "127.0.0.1:7400"}, False, ""),
        ({"listen": FAR, "http_listen": "0.0.0.0:7400"}, True, ""),
        (
            {"listen": NEAR, "http_listen": "0.0.0.0:7400", "security_trusted_network": True},
            False, "",
        ),
        ({"listen": NEAR, "security_enabled": "false"}, False, ""),
        ({"listen": FAR, "kafka_listen": ["127.0.0.1:9092"]}, True, ""),
        ({"listen": NEAR, "kafka_listen": ["127.0.0.1:9092"]}, False, ""),
        ({"listen": NEAR, "kafka_listen": ["0.0.0.0:9092"]}, True, "it is not encrypted"),
        (
            {"listen": NEAR, "kafka_listen": ["0.0.0.0:9092"], "kafka_tls_certificate": "c.pem"},
            True, "",
        ),
        (
            {"listen": NEAR, "kafka_listen": ["0.0.0.0:9092"], "security_enabled": "false"},
            False, "could do everything",
        ),
        (
            {"listen": NEAR, "kafka_listen": ["0.0.0.0:9092"], "security_enabled": "true",
             "security_trusted_network": True},
            True, "",
        ),
        ({"listen": FAR, "kafka_listen": ["PLAINTEXT://127.0.0.1:1"]}, True, "nobody logs in"),
        ({"listen": NEAR, "kafka_listen": ["PLAINTEXT://127.0.0.1:1"]}, False, ""),
        ({"listen": NEAR, "kafka_listen": ["SASL_PLAINTEXT://127.0.0.1:1"]}, False, "no users"),
        ({"listen": NEAR, "kafka_listen": ["SSL://127.0.0.1:1"]}, False, "names no certificate"),
        ({"listen": NEAR, "kafka_listen": ["TLS://127.0.0.1:1"]}, False, "has the protocol 'TLS'"),
        ({"listen": NEAR, "kafka_listen": ["SSL://x"]}, True, "PROTOCOL://HOST:PORT"),
        (
            {"listen": FAR, "kafka_listen": ["SSL://127.0.0.1:1"], "kafka_tls_certificate": "c"},
            True, "names no authority",
        ),
        (
            {"listen": FAR, "kafka_listen": ["SSL://0.0.0.0:1"], "kafka_tls_certificate": "c",
             "kafka_tls_client_ca": "a"},
            True, "",
        ),
        ({"listen": NEAR, "kafka_advertised": "SSL://h:1,SASL_SSL://h:2"}, False, ""),
        ({"listen": NEAR, "kafka_advertised": "h:1,TLS://h:2"}, False, "kafka.advertised has"),
        ({"listen": NEAR, "kafka_tls_client_auth": "required"}, False, "names no authority"),
        ({"listen": NEAR, "kafka_tls_principal_rules": ["RULE:(/$1/"]}, False, "is not valid"),
        ({"listen": NEAR, "kafka_tls_principal_rules": ["CN"]}, False, "RULE:PATTERN"),
        ({"listen": NEAR, "kafka_sasl_enabled_mechanisms": ["GSSAPI"]}, False, "it takes SCRAM"),
        (
            {"listen": NEAR, "kafka_sasl_enabled_mechanisms": ["OAUTHBEARER"],
             "kafka_oauth_audience": ["tailrace"]},
            False, "names no file",
        ),
        (
            {"listen": NEAR, "kafka_sasl_enabled_mechanisms": ["OAUTHBEARER"],
             "kafka_oauth_jwks": "keys.json"},
            False, "nothing is expected",
        ),
        (
            {"listen": NEAR, "kafka_sasl_enabled_mechanisms": ["OAUTHBEARER"],
             "kafka_oauth_jwks": "keys.json", "kafka_oauth_issuer": "i"},
            False, "",
        ),
        (
            {"listen": NEAR, "kafka_listen": ["0.0.0.0:9092"], "security_trusted_network": True},
            False, "",
        ),
    ],
)  # fmt: skip
def test_security_is_on_where_others_reach_it(
    fields: dict[str, Any], secured: bool, refused: str
) -> None:
    settings = Settings(**fields)
    found = " ".join(conflict.sentence for conflict in conflicts(settings, read_topology()))
    assert settings.is_secured is secured
    assert refused in found
    assert bool(found) is bool(refused)


def test_every_setting_of_a_secret_takes_a_credential_of_the_service_manager() -> None:
    """A new one that names a file of a secret is added here, with a test of its own."""
    secret = {"audit.key_file", "backup.key_file", "kafka.tls.certificate", "kafka.tls.key"}
    words = ("key", "secret", "password", "token", "certificate")
    named = {
        name
        for name in definitions()
        if any(word in name for word in words) and not name.endswith(("_max", ".max"))
    }
    assert named == secret
    for name in named:
        assert "credential:NAME" in definitions()[name].doc, name


@pytest.mark.parametrize("value", [True, "true"])
def test_a_file_may_write_true_with_and_without_quotes(value: object) -> None:
    definition = definitions()["security.enabled"]
    assert typed(definition, value) == "true"
    with pytest.raises(InvalidSettingError, match="log_level is True; it takes a text"):
        typed(definitions()["log_level"], True)


PASSWORD_URL = "sftp://backup:planted@host/x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PASSWORD_URL, True), ("s3://:planted@b", True), ("sftp://backup@host/x", False),
        ("s3://bucket/a:b@c", False), ("tcp://[::1]:7420", False), ("/var/a:b@c", False),
        ("https://h/?x=:y@z", False),
    ],
)  # fmt: skip
def test_a_password_in_a_url_is_seen(text: str, expected: bool) -> None:
    assert has_password(text) is expected


def test_no_password_comes_by_the_command_line_of_serve() -> None:
    flags = parse_flags(["--set", f"backup.target={PASSWORD_URL}"])
    with pytest.raises(InvalidSettingError, match="in the list of processes") as caught:
        given_flags(flags)
    assert "planted" not in caught.value.detail


@pytest.mark.parametrize(
    "command",
    [
        ("backup", "run", PASSWORD_URL), ("backup", "list", PASSWORD_URL),
        ("backup", "verify", PASSWORD_URL), ("restore", PASSWORD_URL, "x"),
    ],
    ids=lambda command: " ".join(command[:2]),
)  # fmt: skip
def test_no_password_comes_by_the_command_line_of_a_backup(command: tuple[str, ...]) -> None:
    done = run(None, *command, status=2)
    assert b"in the list of processes" in done.stderr.replace(b"\n", b" ")
    assert b"planted" not in done.stdout + done.stderr
