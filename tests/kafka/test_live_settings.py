"""Settings of the Kafka port that change while it runs: each has its effect in the gateway."""

from __future__ import annotations

import pathlib
import ssl
from typing import Any

from appliance.config.settings import definitions
from tailrace.admin.configs import ConfigResource
from tests.kit.appliances.secured import Users, secured
from tests.kit.hosts.certificates import Authority
from tests.kit.peers.bearer_tokens import Provider, first_message, write_keys
from tests.kit.peers.kafka_logins import PASSWORD, add
from tests.kit.peers.raw_kafka import RawKafka
from tests.kit.processes import wait_until

METADATA, HANDSHAKE, CREATE_TOPICS, AUTHENTICATE, SHARE_HEARTBEAT = 3, 17, 19, 36, 76
BROKER = ConfigResource("broker")
LOGIN_SETTINGS = {
    "kafka.sasl.enabled.mechanisms", "kafka.sasl.plain_without_tls",
    "kafka.connections.max.reauth.ms", "kafka.num.partitions",
}  # fmt: skip
GROUP_SETTINGS = {"kafka.group.settings"}
TLS_SETTINGS = {
    "kafka.tls.certificate", "kafka.tls.key", "kafka.tls.client_ca", "kafka.tls.client_auth"
}  # fmt: skip

TOKEN_SETTINGS = {
    f"kafka.sasl.oauthbearer.{name}"
    for name in (
        "jwks", "expected.issuer", "expected.audience", "sub.claim.name", "clock.skew.seconds"
    )
}  # fmt: skip


def test_the_effect_of_each_setting_is_tested_here() -> None:
    live = {name for name, row in definitions().items() if row.is_live and name[:6] == "kafka."}
    assert live == LOGIN_SETTINGS | TLS_SETTINGS | TOKEN_SETTINGS | GROUP_SETTINGS


def change(users: Users, **values: Any) -> None:
    users.admin.alter_configs(
        {BROKER: {f"kafka.{name.replace('__', '.')}": value for name, value in values.items()}}
    )


def log_in(client: RawKafka) -> dict[str, Any]:
    answer = client.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"})
    if answer["error_code"]:
        return answer
    return client.ask(AUTHENTICATE, 2, {"auth_bytes": f"\0shop\0{PASSWORD}".encode()})


def test_settings_of_logins_and_topics(tmp_path: pathlib.Path) -> None:
    given = {"kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true"}
    with secured(tmp_path, **given) as users:
        add(users, "shop", "create cluster", "describe-configs topic made.")
        address = users.appliance.kafka_addresses[0]

        def offered() -> set[str]:
            with RawKafka(address) as client:
                return set(client.ask(HANDSHAKE, 1, {"mechanism": "none"})["mechanisms"])

        with RawKafka(address) as early, RawKafka(address) as inside:
            assert log_in(inside)["session_lifetime_ms"] == 0
            change(users, sasl__enabled__mechanisms=["PLAIN", "SCRAM-SHA-512"])
            wait_until(lambda: offered() == {"PLAIN", "SCRAM-SHA-512"}, "one is off")
            change(users, connections__max__reauth__ms=60_000)

            def lifetime_ms() -> int:
                with RawKafka(address) as client:
                    return int(log_in(client)["session_lifetime_ms"])

            wait_until(lambda: lifetime_ms() == 60_000, "logins have an end")
            change(users, sasl__plain_without_tls=False)
            wait_until(lambda: offered() == {"SCRAM-SHA-512"}, "passwords are not read")
            assert log_in(early)["error_code"] == 33, "also on a connection from before"
            numbers = iter(range(1_000))

            def partitions() -> int:
                name = f"made.{next(numbers)}"
                topic = {
                    "name": name, "num_partitions": -1, "replication_factor": -1,
                    "assignments": [], "configs": [],
                }  # fmt: skip
                asked = {"timeout_ms": 1_000, "validate_only": False, "topics": [topic]}
                (answer,) = inside.ask(CREATE_TOPICS, 5, asked)["topics"]
                assert answer["error_code"] == 0
                return int(answer["num_partitions"])

            assert partitions() == 1
            change(users, num__partitions=3)
            wait_until(lambda: partitions() == 3, "new topics have three partitions")


def test_settings_of_groups(tmp_path: pathlib.Path) -> None:
    """`tailrace config set` reaches members of Kafka's groups, as `kafka-configs` does."""
    given = {"kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true"}
    with secured(tmp_path, **given) as users:
        add(users, "shop", "read group shop.", "read topic shop.")
        asked = {"group_id": "shop.g", "member_id": "m", "member_epoch": 0,
                 "subscribed_topic_names": ["shop.t"]}  # fmt: skip
        with RawKafka(users.appliance.kafka_addresses[0]) as client:
            assert not log_in(client)["error_code"]

            def interval_ms() -> int:
                return int(client.ask(SHARE_HEARTBEAT, 1, asked)["heartbeat_interval_ms"])

            assert interval_ms() == 3_000
            change(users, group__settings=["group=shop.g share.heartbeat.interval.ms=500"])
            wait_until(lambda: interval_ms() == 500, "members beat more often")


def test_settings_of_tokens(tmp_path: pathlib.Path) -> None:
    first, second = Provider("first"), Provider("second")
    path = tmp_path / "keys.json"
    given = {"kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true"}
    with secured(tmp_path, **given) as users:
        add(users, "shop")
        address = users.appliance.kafka_addresses[0]

        def answer(token: str) -> str:
            with RawKafka(address) as client:
                if client.ask(HANDSHAKE, 1, {"mechanism": "OAUTHBEARER"})["error_code"]:
                    return "not offered"
                answer = client.ask(AUTHENTICATE, 2, {"auth_bytes": first_message(token)})
                return str(answer["error_message"] or "let in")

        def awaits(token: str, text: str) -> None:
            wait_until(lambda: text in answer(token), text)

        assert answer(first.token()) == "not offered"
        change(
            users, sasl__oauthbearer__jwks=write_keys(path, first.public()),
            sasl__oauthbearer__expected__audience=["tailrace"],
            sasl__enabled__mechanisms=["PLAIN", "OAUTHBEARER"],
        )  # fmt: skip
        awaits(first.token(), "let in")
        change(users, sasl__oauthbearer__expected__audience=["payments"])
        awaits(first.token(), "is not for 'payments'")
        token = first.token(aud=["payments"], client="shop", sub="7f3a")
        change(users, sasl__oauthbearer__sub__claim__name="client")
        awaits(token, "let in")
        change(users, sasl__oauthbearer__expected__issuer="https://other.example")
        awaits(token, "not of the issuer 'https://other.example'")
        change(users, sasl__oauthbearer__expected__issuer="")
        awaits(token, "let in")
        late = first.token(aud="payments", client="shop", seconds=-60)
        assert "has expired" in answer(late)
        change(users, sasl__oauthbearer__clock__skew__seconds=600)
        awaits(late, "let in")
        path.write_text("{}")
        users.admin.reload_config()
        assert answer(token) == "let in", "the former keys are in use"
        write_keys(path, second.public())
        users.admin.reload_config()
        awaits(token, "(kid) is not among")
        assert answer(second.token(aud="payments", client="shop")) == "let in"


def test_settings_of_tls(tmp_path: pathlib.Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    certificate, key = authority.sign("broker")
    given = {
        "kafka.listen": "SASL_SSL://127.0.0.1:0", "kafka.tls.certificate": certificate,
        "kafka.tls.key": key,
    }  # fmt: skip
    with secured(tmp_path, **given) as users:
        add(users, "shop")
        address = users.appliance.kafka_addresses[0]

        def is_served(server: Authority, client_authority: Authority | None = None) -> bool:
            context = ssl.create_default_context(cafile=server.path)
            if client_authority is not None:
                context.load_cert_chain(*client_authority.sign("client", f"of-{id(server)}"))
            try:
                with RawKafka(address, context) as client:
                    return not log_in(client)["error_code"]
            except (OSError, AssertionError):
                return False

        assert is_served(authority)
        renewed, renewed_key = other.sign("renewed")
        change(users, tls__certificate=renewed, tls__key=renewed_key)
        wait_until(lambda: is_served(other), "the other certificate and its key are used")
        assert not is_served(authority)
        change(users, tls__client_ca=authority.path, tls__client_auth="required")
        wait_until(lambda: not is_served(other), "clients need certificates")
        assert is_served(other, authority)
        change(users, tls__client_ca=other.path)
        wait_until(lambda: is_served(other, other), "the other authority is asked")
        assert not is_served(other, authority)
