"""The audit log of a running appliance: who did what; a full disk; a killed controller; and no
planted secret in anything that the appliance writes.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import psutil
import pytest

from appliance.audit.verification import read_events, verify
from tailrace import (
    Admin,
    AuditUnavailableError,
    Consumer,
    NewTopic,
    NotAuthorizedError,
    Producer,
    QuotaEntity,
    TailraceError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.protocol.frame import Api
from tests.kit.appliances.secured import secured
from tests.kit.appliances.served import served
from tests.kit.cli import run
from tests.kit.hosts.file_systems import small_file_system
from tests.kit.processes import HANG_LIMIT_S, kill_and_wait_for_successor, wait_until

KEY = "a-planted-secret-of-the-audit-log"
BACKUP_KEY = "a-planted-secret-of-the-backups"


@contextlib.contextmanager
def running(tmp_path: pathlib.Path, **settings: Any) -> Iterator[EmbeddedAppliance]:
    (tmp_path / "audit.key").write_text(KEY)
    given = {
        "audit.enabled": "true", "audit.key_file": str(tmp_path / "audit.key"),
        "audit.directory": str(tmp_path / "audit"),
    }  # fmt: skip
    appliance = start_embedded(data_dir=str(tmp_path / "data"), settings={**given, **settings})
    try:
        yield appliance
    finally:
        assert appliance.stop() == 0


def events(tmp_path: pathlib.Path) -> list[dict[str, Any]]:
    directory = tmp_path / "audit"
    return list(read_events(str(directory))) if directory.exists() else []


def test_it_has_who_did_what_from_where_and_with_which_outcome(tmp_path: pathlib.Path) -> None:
    with running(tmp_path, **{"audit.data": "orders"}) as appliance:
        with Admin(appliance.address, client_id="ops") as admin:
            admin.create_topics(NewTopic("orders"))
            with pytest.raises(UnknownTopicError):
                admin.delete_topics("no-such-topic")
            kill_and_wait_for_successor(appliance, "tr-controller-0")
            admin.alter_topics({"orders": {"retention.ms": 3_600_000}})
        with Producer(appliance.address, client_id="till") as producer:
            producer.send("orders", b"v").result(HANG_LIMIT_S)
        with Consumer(
            "orders", bootstrap=appliance.address, client_id="desk", auto_offset_reset="earliest"
        ) as consumer:
            while not consumer.poll(timeout_ms=1_000):
                pass

        def has_all() -> bool:
            found = events(tmp_path)
            accesses = {(e["client"], e["operation"]) for e in found if e["event"] == "access"}
            results = {
                (e["api"], e["outcome"]) for e in found if e["event"] == "result"
            }  # one may be there twice, because the controller has ended
            return accesses == {("till", "write"), ("desk", "read")} and results == {
                ("CREATE_TOPICS", "allowed"), ("DELETE_TOPICS", "failed"),
                ("ALTER_TOPICS", "allowed"),
            }  # fmt: skip

        wait_until(has_all, "every event is written")
    found = events(tmp_path)
    requested = [e for e in found if e["event"] == "request" and e["client"] == "ops"]
    assert [event["api"] for event in requested] == [
        "CREATE_TOPICS", "DELETE_TOPICS", "ALTER_TOPICS"
    ]  # fmt: skip
    assert requested[1]["request"]["topics"][0]["name"] == "no-such-topic"
    assert all(event["address"].startswith("127.0.0.1:") for event in requested)
    assert {event["user"] for event in requested} == {"User:ANONYMOUS"}
    assert {"ops", "till", "desk"} <= {e["client"] for e in found if e["event"] == "login"}
    assert verify(str(tmp_path / "audit"), KEY.encode()).findings == []
    key_file = str(tmp_path / "audit.key")
    done = run(None, "audit", "verify", str(tmp_path / "audit"), "--key-file", key_file)
    assert b": whole" in done.stdout
    assert b"orders" in run(None, "audit", "list", str(tmp_path / "audit")).stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_of_the_audit_log_refuses_administration_and_data_goes_on(
    tmp_path: pathlib.Path,
) -> None:
    with small_file_system(tmp_path, 16) as disk:
        settings = {"audit.directory": str(disk / "audit")}
        with (
            running(tmp_path, **settings) as appliance,
            Admin(appliance.address, client_id="ops") as admin,
            Producer(appliance.address) as producer,
        ):
            admin.create_topics(NewTopic("orders"))
            _fill(disk / "filler")

            def is_refused() -> bool:
                try:
                    admin.alter_topics({"orders": {"retention.ms": 3_600_000}})
                except AuditUnavailableError as error:
                    return "No space left" in str(error)
                return False

            wait_until(is_refused, "administration is refused")
            producer.send("orders", b"v").result(HANG_LIMIT_S)
            assert admin.list_topics() == ["orders"]
            (disk / "filler").unlink()
            wait_until(lambda: not is_refused(), "administration goes on")
        assert verify(str(disk / "audit"), KEY.encode()).findings == []
        written = [e for e in read_events(str(disk / "audit")) if e["event"] == "request"]
        assert written[0]["api"] == "CREATE_TOPICS"


def _fill(path: pathlib.Path) -> None:
    """Fill a disk to its last byte."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    size = 1 << 20
    while size:
        try:
            while os.write(fd, bytes(size)):
                pass
        except OSError:
            size //= 2
    os.close(fd)


def test_a_key_file_that_is_gone_refuses_administration_with_its_name(
    tmp_path: pathlib.Path,
) -> None:
    missing = str(tmp_path / "no-such-key")
    with (
        running(tmp_path, **{"audit.key_file": missing}) as appliance,
        Admin(appliance.address) as admin,
    ):
        with pytest.raises(AuditUnavailableError, match="no-such-key"):
            admin.create_topics(NewTopic("orders"))
        pathlib.Path(missing).write_text(KEY)
        admin.create_topics(NewTopic("orders"))


def test_no_planted_secret_is_in_anything_that_the_appliance_writes(
    tmp_path: pathlib.Path,
) -> None:
    """Keys in files and in a credential of systemd, a password in a URL of the configuration, and
    secrets that a client sends under names of secrets.
    """
    url_password, sent = "planted-password-in-a-url", "planted-in-a-request"
    planted = {KEY, BACKUP_KEY, url_password, sent}
    secrets, home = tmp_path / "secrets", tmp_path / "home"
    secrets.mkdir()
    home.mkdir()
    (secrets / "audit").write_text(KEY)
    (secrets / "backup.key").write_text(BACKUP_KEY)
    text = (
        'log_level = "debug"\naudit.enabled = true\naudit.key_file = "credential:audit"\n'
        f'backup.key_file = "{secrets}/backup.key"\n'
        f'backup.target = "s3://user:{url_password}@bucket/x"\n'
    )
    written: list[bytes] = []
    bundle = tmp_path / "bundle.tar.gz"
    with served(home, text, CREDENTIALS_DIRECTORY=str(secrets)) as appliance:
        config = str(appliance.config)
        with Admin(appliance.address) as admin:
            admin.create_topics(NewTopic("orders"))
            with contextlib.suppress(TailraceError):
                request = {"topics": [{"name": "x", "configs": {"password": sent}}]}
                admin._run_steps(admin._call(Api.CREATE_TOPICS, request))
            written.append(repr(admin.config_state()).encode())
        supervisor = psutil.Process(appliance.process.pid)
        for process in [supervisor, *supervisor.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                written.append(" ".join(process.cmdline()).encode())
        for command in (
            ("status", "--json"), ("doctor", "--config", config, "--bundle", str(bundle)),
            ("config", "show", "--config", config), ("config", "diff", config),
        ):  # fmt: skip
            done = run(cast("EmbeddedAppliance", At(appliance.address)), *command, status=None)
            written += [done.stdout, done.stderr]
    appliance.config.unlink()
    files = [path for path in home.rglob("*") if path.is_file()]
    written += [path.read_bytes() for path in files]
    with tarfile.open(bundle) as archive:
        members = [archive.extractfile(name) for name in archive.getnames()]
        written += [member.read() for member in members if member is not None]
    everything = b"\n".join(written)
    assert b"orders" in everything
    assert b"CREATE_TOPICS" in everything
    assert b"s3://(secret)@bucket/x" in everything
    assert {secret for secret in planted if secret.encode() in everything} == set()
    assert verify(str(home / "data" / "audit"), KEY.encode()).findings == []


class At(NamedTuple):
    """The address of an appliance, for `run`."""

    address: str


def test_users_have_quotas_and_lines_of_their_own(tmp_path: pathlib.Path) -> None:
    """Two users: one is slowed, and what it may not do is denied and written with its name."""
    audit = tmp_path / "audit"
    settings = {"audit.enabled": "true", "audit.directory": str(audit)}
    with secured(tmp_path, **settings) as users:
        users.admin.create_topics(NewTopic("orders"))
        slow = users.add("slow", "write topic orders", "describe topic orders")
        fast = users.add("fast", "write topic orders", "describe topic orders")
        users.admin.alter_quotas({QuotaEntity(user="slow"): {"producer_byte_rate": "20KiB"}})
        waits = {}
        for name, address in (("slow", slow), ("fast", fast)):
            with Producer(address, client_id="same", batch_size=8_000) as producer:
                for _ in range(40):
                    producer.send("orders", os.urandom(1_000))
                producer.flush(HANG_LIMIT_S)
                waits[name] = producer.metrics()["throttled"]
        assert waits["slow"] > 0
        assert waits["fast"] == 0
        with Admin(slow, client_id="same") as admin:
            with pytest.raises(NotAuthorizedError):
                admin.alter_quotas({QuotaEntity(user="slow"): None})
            with pytest.raises(NotAuthorizedError):
                admin.describe_quotas()

        def denied() -> set[tuple[str, str]]:
            found = read_events(str(audit))
            return {
                (row["user"], row["api"]) for row in found
                if row.get("code") == "NOT_AUTHORIZED"
            }  # fmt: skip

        wait_until(
            lambda: {("User:slow", "ALTER_QUOTAS"), ("User:slow", "DESCRIBE_QUOTAS")} <= denied(),
            "denials are written",
        )
    made = [e for e in read_events(str(audit)) if e["event"] == "request"]
    assert {"ALTER_USERS", "ALTER_ACLS", "CREATE_TOPICS"} <= {e["api"] for e in made}
    assert made[0]["user"] != "User:ANONYMOUS"


def test_the_log_is_copied_into_a_topic_each_line_once_over_restarts_and_rotation(
    tmp_path: pathlib.Path,
) -> None:
    from appliance.audit.topic_copy import TopicCopy

    with running(tmp_path, **{"audit.file.bytes": "4KiB"}) as appliance:
        directory = str(tmp_path / "audit")
        with Admin(appliance.address) as admin:
            admin.create_topics([NewTopic("audit"), NewTopic("wide", 2)])
            with pytest.raises(TailraceError, match="2 partitions"):
                TopicCopy(directory, "wide", appliance.address)
            for number in range(10):
                copying = TopicCopy(directory, "audit", appliance.address)
                admin.create_topics(NewTopic(f"t{number}"))
                copying.step()
                admin.delete_topics(f"t{number}")
                copying.step()
                copying.close()
        first, second = (TopicCopy(directory, "audit", appliance.address) for _ in range(2))
        with Admin(appliance.address) as admin:
            admin.create_topics(NewTopic("once"))
        assert first.step()
        with pytest.raises(TailraceError, match="another writer"):
            second.step()
        first.close()
        second.close()
        out = run(appliance, "audit", "copy", directory, "--topic", "audit").stdout
        assert b"copied, up to" in out
        with Consumer(
            "audit", bootstrap=appliance.address, auto_offset_reset="earliest"
        ) as consumer:
            lines = [record.value for record in consumer.consume(40, timeout=HANG_LIMIT_S)]
        written = [
            line
            for path in sorted((tmp_path / "audit").glob("audit-*.jsonl"))
            for line in path.read_bytes().splitlines()
        ]
        assert len(list((tmp_path / "audit").glob("audit-*.jsonl"))) > 1
        assert lines == written[:40]


def test_metrics_and_status_tell_of_the_audit_log(tmp_path: pathlib.Path) -> None:
    with running(tmp_path) as appliance, Admin(appliance.address) as admin:
        admin.create_topics(NewTopic("orders"))
        wait_until(
            lambda: admin.describe_cluster()["audit"]["lines"].get("result", 0) == 1,
            "the result is written",
        )
        state = admin.describe_cluster()["audit"]
        assert state["lines"]["request"] == 1
        assert (state["is_failing"], state["failures"], state["dropped"]) == (False, 0, 0)
        key = tmp_path / "audit.key"
        key.unlink()
        kill_and_wait_for_successor(appliance, "tr-controller-0")

        def is_refused() -> bool:
            with contextlib.suppress(AuditUnavailableError):
                admin.create_topics(NewTopic("more"))
                return False
            return True

        wait_until(is_refused, "administration is refused")
        state = admin.describe_cluster()["audit"]
        assert state["is_failing"]
        assert state["failures"] > 0
        assert b"the audit log" in run(appliance, "status", status=None).stdout
        key.write_text(KEY)
        wait_until(
            lambda: not admin.describe_cluster()["audit"]["is_failing"],
            "the events that wait are written",
        )
