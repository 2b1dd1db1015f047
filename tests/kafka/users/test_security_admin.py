"""Kafka's tools administer the appliance's users, rules and quotas."""

from __future__ import annotations

import glob
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from bench.peers.kafka import CACHE, NODE
from tailrace import NewTopic, QuotaEntity
from tests.kit.appliances.secured import Users, acl, secured
from tests.kit.peers.kafka_logins import PASSWORD, add, connect, librdkafka
from tests.kit.peers.raw_kafka import RawKafka
from tests.kit.processes import HANG_LIMIT_S

JARS = os.path.join(CACHE, NODE[0], "libs")
ANY_ACL = AclBindingFilter(
    ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY,
    AclPermissionType.ANY,
)  # fmt: skip


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    settings = {"kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true"}
    with secured(tmp_path_factory.mktemp("admin"), **settings) as found:
        found.admin.create_topics([NewTopic("orders")])
        add(found, "root", admin=True)
        add(found, "nobody")
        yield found


@pytest.fixture
def admin(users: Users) -> AdminClient:
    return AdminClient(librdkafka(users, "root"))


def binding(name: str, operation: AclOperation, **changed: Any) -> AclBinding:
    fields = {
        "kind": ResourceType.TOPIC, "pattern": ResourcePatternType.LITERAL,
        "principal": "User:shop", "host": "*", "permission": AclPermissionType.ALLOW, **changed,
    }  # fmt: skip
    return AclBinding(
        fields["kind"], name, fields["pattern"], fields["principal"], fields["host"], operation,
        fields["permission"],
    )  # fmt: skip


def test_rules_are_made_listed_and_removed(users: Users, admin: AdminClient) -> None:
    users.admin.add_user("shop")
    made = [
        binding("orders", AclOperation.READ),
        binding("shop.", AclOperation.WRITE, pattern=ResourcePatternType.PREFIXED),
        binding("orders", AclOperation.ALL, host="10.0.0.1", permission=AclPermissionType.DENY),
        binding("kafka-cluster", AclOperation.DESCRIBE, kind=ResourceType.BROKER),
    ]
    for future in admin.create_acls(made).values():
        future.result(HANG_LIMIT_S)
    ours = users.admin.list_acls({"principal": "User:shop"})
    assert {(one["resource_type"], one["name"], one["operation"]) for one in ours} == {
        ("topic", "orders", "read"), ("topic", "shop.", "write"), ("topic", "orders", "all"),
        ("cluster", "tailrace", "describe"),
    }  # fmt: skip
    found = admin.describe_acls(ANY_ACL).result(HANG_LIMIT_S)
    assert set(made) <= set(found)
    matching = AclBindingFilter(
        ResourceType.TOPIC, "shop.orders", ResourcePatternType.MATCH, None, None,
        AclOperation.ANY, AclPermissionType.ANY,
    )  # fmt: skip
    assert admin.describe_acls(matching).result(HANG_LIMIT_S) == [made[1]]
    users.admin.add_acls([acl("User:shop", "alter delay orders")])
    assert len(admin.describe_acls(ANY_ACL).result(HANG_LIMIT_S)) == len(found), "delays are ours"
    denials = AclBindingFilter(
        ResourceType.ANY, None, ResourcePatternType.ANY, "User:shop", None, AclOperation.ANY,
        AclPermissionType.DENY,
    )  # fmt: skip
    [removed] = admin.delete_acls([denials]).values()
    assert removed.result(HANG_LIMIT_S) == [made[2]]
    assert len(users.admin.list_acls({"principal": "User:shop"})) == 4
    for future in admin.create_acls(
        [binding("x", AclOperation.READ, principal="shop"), binding("x", AclOperation.READ)]
    ).values():
        if future.exception(HANG_LIMIT_S) is not None:
            assert "User:NAME" in str(future.exception())
    assert users.admin.list_acls({"name": "x"})


def test_passwords_are_set_listed_and_removed(users: Users, admin: AdminClient) -> None:
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    made = UserScramCredentialUpsertion("made", info, b"a new password")
    for future in admin.alter_user_scram_credentials([made]).values():
        future.result(HANG_LIMIT_S)
    found = admin.describe_user_scram_credentials(["made"])["made"].result(HANG_LIMIT_S)
    assert [(each.mechanism, each.iterations) for each in found.scram_credential_infos] == [
        (ScramMechanism.SCRAM_SHA_256, 4096)
    ]
    login = {**librdkafka(users, "made"), "sasl.password": "a new password"}
    assert AdminClient(login).list_topics(timeout=HANG_LIMIT_S).topics == {}
    removal = UserScramCredentialDeletion("made", ScramMechanism.SCRAM_SHA_256)
    for future in admin.alter_user_scram_credentials([removal]).values():
        future.result(HANG_LIMIT_S)
    for future in admin.alter_user_scram_credentials([removal]).values():
        assert "no such credential" in str(future.exception(HANG_LIMIT_S))
    assert users.admin.list_users("made")[0]["scram"] == {}
    weak = UserScramCredentialUpsertion(
        "made", ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 100), b"a new password"
    )
    for future in admin.alter_user_scram_credentials([weak]).values():
        assert "4096 to 16384 iterations" in str(future.exception(HANG_LIMIT_S))
    missing = admin.describe_user_scram_credentials(["missing"])["missing"]
    assert missing.exception(HANG_LIMIT_S) is not None


def test_a_password_of_kafkas_tools_replaces_the_one_of_ours(
    users: Users, admin: AdminClient
) -> None:
    add(users, "former")
    with connect(users, "former"):
        pass
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
    change = UserScramCredentialUpsertion("former", info, b"another password")
    for future in admin.alter_user_scram_credentials([change]).values():
        future.result(HANG_LIMIT_S)
    [user] = users.admin.list_users("former")
    assert (user["has_password"], user["scram"]) == (False, {"SCRAM-SHA-512": 4096})


def quotas(client: RawKafka, components: list[dict[str, Any]], strict: bool) -> list[Any]:
    answer = client.ask(48, 1, {"components": components, "strict": strict})
    assert answer["error_code"] == 0
    return [
        (
            [(part["entity_type"], part["entity_name"]) for part in entry["entity"]],
            {value["key"]: value["value"] for value in entry["values"]},
        )
        for entry in answer["entries"]
    ]


def test_quotas_are_set_listed_and_removed(users: Users) -> None:
    def entry(user: str | None, *ops: tuple[str, float, bool]) -> dict[str, Any]:
        return {
            "entity": [{"entity_type": "user", "entity_name": user}],
            "ops": [{"key": key, "value": value, "remove": gone} for key, value, gone in ops],
        }  # fmt: skip

    with connect(users, "root") as root:
        asked = [
            entry("shop", ("producer_byte_rate", 1e6, False)),
            entry(None, ("consumer_byte_rate", 2e6, False)),
            entry("shop", ("request_percentage", 10.0, False)),
            {**entry("x"), "entity": [{"entity_type": "ip", "entity_name": "10.0.0.1"}]},
        ]
        answer = root.ask(49, 1, {"entries": asked, "validate_only": False})
        assert [each["error_code"] for each in answer["entries"]] == [0, 0, 42, 42]
        assert "request_rate" in answer["entries"][2]["error_message"]
        assert users.admin.describe_quotas() == {
            QuotaEntity(user="shop"): {"producer_byte_rate": 1_000_000},
            QuotaEntity(user="*"): {"consumer_byte_rate": 2_000_000},
        }
        users.admin.alter_quotas(
            {
                QuotaEntity(user="shop", client="app"): {"request_rate": 5_000},
                QuotaEntity(prefix="shop."): {"topics_max": 3},
            }
        )
        both = ([("user", "shop"), ("client-id", "app")], {"request_rate": 5000.0})
        mine = ([("user", "shop")], {"producer_byte_rate": 1e6})
        every = ([("user", None)], {"consumer_byte_rate": 2e6})
        exact = {"entity_type": "user", "match_type": 0, "match": "shop"}
        default = {"entity_type": "user", "match_type": 1, "match": None}
        assert len(quotas(root, [], strict=False)) == 3
        assert quotas(root, [exact], strict=True) == [mine]
        found = quotas(root, [exact], strict=False)
        assert len(found) == 2
        assert mine in found
        assert both in found
        assert quotas(root, [default], strict=True) == [every]
        removal = entry("shop", ("producer_byte_rate", 0.0, True))
        assert root.ask(49, 1, {"entries": [removal], "validate_only": True})["entries"]
        assert quotas(root, [exact], strict=True) == [mine]
        root.ask(49, 1, {"entries": [removal], "validate_only": False})
        assert quotas(root, [exact], strict=True) == []


def test_without_users_the_tools_are_told(gateway: str) -> None:
    with RawKafka(gateway) as client:
        answer = client.ask(
            29, 3,
            {"resource_type_filter": 1, "resource_name_filter": None, "pattern_type_filter": 1,
             "principal_filter": None, "host_filter": None, "operation": 1, "permission_type": 1},
        )  # fmt: skip
        assert answer["error_code"] == 54
        assert "security.enabled" in answer["error_message"]


# ---- Java ----------------------------------------------------------------------------------------


def tool(name: str, properties: pathlib.Path, gateway: str, *arguments: str) -> str:
    command = ["java", "-Xmx256m", "-XX:-UsePerfData", "-cp", f"{JARS}/*", name,
               "--bootstrap-server", gateway, "--command-config", str(properties),
               *arguments]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def properties(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "client.properties"
    path.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-512\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required "
        f'username="root" password="{PASSWORD}";\n'
    )
    return path


@pytest.mark.skipif(
    shutil.which("java") is None or not glob.glob(f"{JARS}/*.jar"),
    reason="Java or Kafka's jars are not here (`python -m bench.peers` fetches them)",
)
@pytest.mark.long
@pytest.mark.slow_because("each tool starts a Java machine")
def test_kafkas_command_line_administers_users(users: Users, properties: pathlib.Path) -> None:
    gateway = users.appliance.kafka_addresses[0]
    acls, configs = "org.apache.kafka.tools.AclCommand", "kafka.admin.ConfigCommand"
    user = ("--entity-type", "users", "--entity-name", "java")
    for change in (
        "SCRAM-SHA-256=[iterations=8192,password=java-secret]", "producer_byte_rate=3000000",
    ):  # fmt: skip
        tool(configs, properties, gateway, "--alter", *user, "--add-config", change)
    described = tool(configs, properties, gateway, "--describe", *user)
    assert "SCRAM-SHA-256=iterations=8192" in described
    assert "producer_byte_rate=3000000" in described
    told = tool(
        acls, properties, gateway, "--add", "--allow-principal", "User:java", "--producer",
        "--topic", "java.", "--resource-pattern-type", "prefixed",
    )  # fmt: skip
    assert "operation=WRITE" in told
    listed = tool(acls, properties, gateway, "--list", "--principal", "User:java")
    assert "patternType=PREFIXED" in listed
    assert {one["operation"] for one in users.admin.list_acls({"principal": "User:java"})} == {
        "write", "describe", "create"
    }  # fmt: skip
    tool(
        acls, properties, gateway, "--remove", "--force", "--topic", "java.",
        "--resource-pattern-type", "prefixed",
    )  # fmt: skip
    assert users.admin.list_acls({"principal": "User:java"}) == []
