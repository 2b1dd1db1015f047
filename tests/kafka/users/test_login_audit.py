"""Logins of Kafka clients are audited, and no password or credential is written anywhere."""

from __future__ import annotations

import base64
import os
import pathlib

import orjson
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from shm.rights.passwords import fields_of
from tests.kit.appliances.secured import Users, secured
from tests.kit.peers.kafka_logins import PASSWORD, add, connect, librdkafka
from tests.kit.peers.raw_kafka import RawKafka
from tests.kit.processes import HANG_LIMIT_S, wait_until

PLANTED = "planted-password-7391"


def lines(users: Users) -> list[dict[str, object]]:
    directory = pathlib.Path(users.appliance.data_dir, "audit")
    text = b"".join(path.read_bytes() for path in sorted(directory.glob("*.jsonl")))
    return [orjson.loads(line) for line in text.splitlines()]


def test_logins_leave_lines_and_no_secret(tmp_path: pathlib.Path) -> None:
    settings = {
        "kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true",
        "audit.enabled": "true",
    }  # fmt: skip
    with secured(tmp_path, **settings) as users:
        add(users, "root", admin=True)
        fields = fields_of(PLANTED)
        users.admin.add_user("shop", **fields)
        address = users.appliance.kafka_addresses[0]
        for name, password in (("shop", "wrong-" + PLANTED), ("nobody", PLANTED)):
            for _ in range(2):
                with RawKafka(address) as client:
                    client.ask(17, 1, {"mechanism": "PLAIN"})
                    token = f"\0{name}\0{password}".encode()
                    assert client.ask(36, 2, {"auth_bytes": token})["error_code"] == 58
        with connect(users, "root") as client:
            client.ask(3, 9, {"topics": None})
        admin = AdminClient(librdkafka(users, "root"))
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        change = UserScramCredentialUpsertion("shop", info, PLANTED.encode())
        for future in admin.alter_user_scram_credentials([change]).values():
            future.result(HANG_LIMIT_S)

        def has_all() -> bool:
            found = lines(users)
            denied = {line.get("user") for line in found if line["event"] == "denied"}
            logins = {line.get("user") for line in found if line["event"] == "login"}
            return {"User:shop", "User:nobody"} <= denied and "User:root" in logins

        wait_until(has_all, "the lines are written")
        found = lines(users)
        assert all(
            str(line["address"]).startswith("127.0.0.1")
            for line in found
            if line.get("user") == "User:nobody"
        )
        denied = [line for line in found if line.get("user") == "User:nobody"]
        assert len(denied) == 1, "repeats are counted"
        requests = [line for line in found if line.get("api") == "ALTER_USERS"]
        assert requests
        secrets = {PLANTED.encode(), PASSWORD.encode()}
        for credential in fields["scram_credentials"]:
            secrets |= {
                bytes(credential[name], "ascii") for name in ("stored_key", "server_key")
            } | {base64.b64decode(credential[name]) for name in ("stored_key", "server_key")}
        written = [pathlib.Path(users.appliance.log_path)]
        for folder, _, names in os.walk(users.appliance.data_dir):
            written += [pathlib.Path(folder, name) for name in names]
        for path in written:
            if path.name.startswith("coordinator.db") or not path.is_file():
                continue  # the catalog has the credentials
            data = path.read_bytes()
            assert not [secret for secret in secrets if secret in data], path
        catalog = b"".join(
            path.read_bytes() for path in written if path.name.startswith("coordinator.db")
        )
        assert PLANTED.encode() not in catalog
        assert PASSWORD.encode() not in catalog


def test_a_denied_part_of_a_request_leaves_a_line(tmp_path: pathlib.Path) -> None:
    """The gateway takes it out of the request, so the front, which has the audit log, sees none."""
    settings = {
        "kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true",
        "audit.enabled": "true",
    }  # fmt: skip
    with secured(tmp_path, **settings) as users:
        add(users, "limited", "describe topic seen")
        data = [{"index": 0, "records": None}]
        names = [{"name": name, "partition_data": data} for name in ("seen", "hidden")]
        written = {"transactional_id": None, "acks": 1, "timeout_ms": 1, "topic_data": names}
        joined = {
            "group_id": "g", "session_timeout_ms": 10_000, "rebalance_timeout_ms": 1_000,
            "member_id": "", "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        }  # fmt: skip
        rule = {"resource_type": 2, "resource_name": "x", "host": "*", "resource_pattern_type": 3,
                "principal": "User:x", "operation": 3, "permission_type": 3}  # fmt: skip
        with connect(users, "limited") as client:
            for _ in range(2):
                client.ask(0, 9, written)
            client.ask(11, 5, joined)
            client.ask(30, 3, {"creations": [rule]})
            listed = client.ask(3, 9, {"topics": None})["topics"]  # what is not listed is no denial
        expected = {
            ("Kafka Produce", "User:limited may not write topic 'seen'"),
            ("Kafka Produce", "User:limited may not write topic 'hidden'"),
            ("Kafka JoinGroup", "User:limited may not read group 'g'"),
            ("Kafka CreateAcls", "User:limited may not alter the appliance"),
        }

        def reasons() -> set[tuple[object, object]]:
            return {
                (line["api"], line["reason"]) for line in lines(users) if line["event"] == "denied"
            }

        wait_until(lambda: reasons() >= expected, "the lines are written")
        assert reasons() == expected
        denied = [line for line in lines(users) if line["event"] == "denied"]
        assert {line["user"] for line in denied} == {"User:limited"}
        assert all(str(line["address"]).startswith("127.0.0.1") for line in denied)
        assert listed == []
