"""SIGHUP, `tailrace reload` and `tailrace config set`: a running appliance takes changed settings,
in the processes that use them, and a wrong configuration changes nothing.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
from collections.abc import Iterator

import pytest

from appliance.config.files.locations import default_path
from tailrace import (
    Admin,
    ConfigResource,
    Consumer,
    InvalidRequestError,
    InvalidSettingError,
    NewTopic,
    Producer,
    TailraceError,
)
from tests.kit.appliances.served import Served, served
from tests.kit.cli import run
from tests.kit.processes import wait_until

BROKER = ConfigResource("broker")


@pytest.fixture(scope="module")
def appliance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), "groups.max = 1000\n") as running:
        yield running


@pytest.fixture
def admin(appliance: Served) -> Iterator[Admin]:
    """After a test, nothing is set and the file is as it was."""
    with Admin(appliance.address) as client:
        yield client
        entries = client.describe_configs(BROKER)[BROKER]
        client.alter_configs(
            {BROKER: {name: None for name, entry in entries.items() if entry.source == "config set"}
             or {"log_level": None}}
        )  # fmt: skip
        appliance.config.write_text("groups.max = 1000\n")
        client.reload_config()


def pids(admin: Admin) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in admin.describe_cluster()["processes"]}


# ---- the ways ------------------------------------------------------------------------------------


def test_sighup_applies_the_file_and_stops_nothing(appliance: Served, admin: Admin) -> None:
    before, mark = pids(admin), len(appliance.log)
    appliance.config.write_text("groups.max = 7\nslots = 100\n")
    appliance.hang_up()
    appliance.wait_for("settings_reloaded changed=groups.max", mark)
    appliance.wait_for("restart_needed settings=slots", mark)
    assert admin.describe_configs(BROKER)[BROKER]["groups.max"].value == 7
    assert admin.describe_configs(BROKER)[BROKER]["slots"].after_restart == 100
    assert pids(admin) == before


def test_sighup_of_a_wrong_file_changes_nothing_and_says_where_it_is_wrong(
    appliance: Served, admin: Admin
) -> None:
    mark = len(appliance.log)
    appliance.config.write_text("groups.max = 7\n\nring_byte = 1\nlog_level = 3\n")
    appliance.hang_up()
    appliance.wait_for("settings_not_reloaded errors=2", mark)
    errors = appliance.log[mark:]
    assert f"{appliance.config}:3: unknown setting 'ring_byte'; did you mean ring_bytes?" in errors
    assert f"{appliance.config}:4: log_level is 3; it takes a text" in errors
    assert admin.describe_configs(BROKER)[BROKER]["groups.max"].value == 1000


def test_the_command_reports_what_changed_and_what_needs_a_restart(
    appliance: Served, admin: Admin
) -> None:
    bootstrap = ("--bootstrap", appliance.address)
    appliance.config.write_text("groups.max = 8\nlane_bytes = '8MiB'\n")
    done = run(None, "reload", *bootstrap)
    assert done.stdout.decode() == "changed: groups.max\nneeds a restart: lane_bytes\n"
    appliance.config.write_text("groups.max = 9\nfronts = 'two'\n")
    done = run(None, "reload", *bootstrap, status=2)
    assert f"{appliance.config}:2: fronts is 'two'" in done.stderr.decode()
    assert "nothing was changed" in done.stderr.decode()
    assert admin.describe_configs(BROKER)[BROKER]["groups.max"].value == 8
    status = run(None, "status", *bootstrap).stdout.decode()
    assert "problem: the configuration was not reloaded" in status
    assert "nothing is wrong" not in status
    appliance.config.write_text("groups.max = 9\nlane_bytes = '8MiB'\n")
    run(None, "reload", *bootstrap, "--json")
    assert "needs a restart: lane_bytes" in run(None, "status", *bootstrap).stdout.decode()


def test_a_file_changed_to_a_wrong_one_between_check_and_reload_changes_nothing(
    appliance: Served, admin: Admin
) -> None:
    appliance.config.write_text("groups.max = 8\n")
    run(None, "config", "check", str(appliance.config))
    appliance.config.write_bytes(b"groups.max = \xff\n")
    report = admin.reload_config()
    assert "is not UTF-8" in report["errors"][0]
    assert admin.describe_configs(BROKER)[BROKER]["groups.max"].value == 1000


def test_a_difference_from_the_file_is_shown_with_how_it_would_come_into_force(
    appliance: Served, admin: Admin
) -> None:
    bootstrap = ("--bootstrap", appliance.address)
    appliance.config.write_text("groups.max = 8\nslots = 100\nlog_level = 'error'\n")
    admin.alter_configs({BROKER: {"log_level": "debug"}})
    done = run(None, "config", "diff", str(appliance.config), *bootstrap, "--json", status=1)
    found = {
        row["name"]: (row["running"], row["file"], row["with"]) for row in json.loads(done.stdout)
    }
    assert found["groups.max"] == (1000, 8, "a reload")
    assert found["slots"] == (4096, 100, "a restart")
    assert found["log_level"] == ("debug", "error", "not: config set wins")
    assert found["ring_bytes"][2] == "not: TAILRACE_RING_BYTES sets it"
    if default_path() is None:
        run(None, "reload", *bootstrap)
        done = run(None, "config", "diff", *bootstrap, status=2)
        assert f"was started with {appliance.config}" in done.stderr.decode()


def test_settings_of_the_catalog_survive_a_kill_of_every_process_and_a_restart(
    tmp_path: pathlib.Path,
) -> None:
    with served(tmp_path, "") as first:
        run(None, "config", "set", "groups.max=77", "topic.segment.bytes=1MiB",
            "--bootstrap", first.address)  # fmt: skip
        first.process.kill()
        first.process.wait()
    with served(tmp_path, "groups.max = 5\n") as second, Admin(second.address) as admin:
        entry = admin.describe_configs(BROKER)[BROKER]["groups.max"]
        assert (entry.value, entry.source) == (77, "config set")
        admin.create_topics(NewTopic("x"))
        assert admin.describe_configs("x")["x"]["segment.bytes"] == 1 << 20
        shown = run(None, "config", "unset", "groups.max", "--bootstrap", second.address)
        assert shown.stdout.decode().split()[-3:] == ["groups.max", "5", str(second.config)]


def test_bad_changes_are_refused_with_a_sentence_and_nothing_of_them_is_kept(admin: Admin) -> None:
    for values, sentence in (
        ({"groups.max": 5, "ring_bytes": 1 << 20}, "ring_bytes needs a restart"),
        ({"groups.max": 5, "ring_byte": 1}, "did you mean ring_bytes"),
        ({"groups.max": 0}, "whole number from 1"),
        ({"groups.max": 5, "group.session.timeout.min.ms": "1h"}, "must not be above"),
        ({"topic.max.message.bytes": "4MiB"}, "for ring_bytes = "),
        ({"topic.durability": "paper"}, "topic.durability is 'paper'"),
        ({"groups.max": 5, "nothing": None}, "unknown setting 'nothing'"),
    ):
        with pytest.raises(InvalidSettingError, match=sentence):
            admin.alter_configs({BROKER: values})
    with pytest.raises(TailraceError, match="needs `set`"):
        admin.alter_configs({BROKER: {}})
    admin.alter_configs({BROKER: {"groups.max": 5}}, validate_only=True)
    entry = admin.describe_configs(BROKER)[BROKER]["groups.max"]
    assert (entry.value, entry.source.rsplit("/", 1)[-1]) == (1000, "tailrace.toml")


def test_a_restarted_process_has_the_changed_settings(appliance: Served, admin: Admin) -> None:
    admin.alter_configs({BROKER: {"group.session.timeout.max.ms": "5s"}})
    with pytest.raises(InvalidRequestError, match="5000"):
        poll_with_session_timeout(appliance, 10_000)
    process = pids(admin)["groups-0"]
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: pids(admin)["groups-0"] != process, "the process of groups is restarted")
    with pytest.raises(InvalidRequestError, match="5000"):
        poll_with_session_timeout(appliance, 10_000)


def poll_with_session_timeout(appliance: Served, session_timeout_ms: int) -> None:
    with Admin(appliance.address) as admin:
        if "polled" not in admin.list_topics():
            admin.create_topics(NewTopic("polled"))
    with Consumer(
        "polled", bootstrap=appliance.address, group_id="g", session_timeout_ms=session_timeout_ms
    ) as consumer:
        consumer.poll(timeout_ms=60_000)


# ---- what acts in which process ------------------------------------------------------------------


def test_the_log_level_changes_in_every_process(appliance: Served, admin: Admin) -> None:
    admin.alter_configs({BROKER: {"log_level": "error"}})
    mark = len(appliance.log)
    admin.create_topics(NewTopic("quiet"))
    assert "topic=quiet" not in appliance.log[mark:]
    admin.alter_configs({BROKER: {"log_level": None}})
    admin.create_topics(NewTopic("loud"))
    appliance.wait_for("process=tr-controller-0 topic_changed topic=loud", mark)
    appliance.wait_for("process=tr-flusher-0 log_opened topic=loud", mark)


def test_topics_are_created_by_producers_from_the_change_on(
    appliance: Served, admin: Admin
) -> None:
    with Producer(appliance.address) as producer, pytest.raises(TailraceError):
        producer.send("missing", b"x").result(timeout=60)
    admin.alter_configs({BROKER: {"auto_create_topics": True}})
    with Producer(appliance.address) as producer:
        producer.send("missing", b"x").result(timeout=60)
    assert "missing" in admin.list_topics()


def test_defaults_of_topics_reach_existing_topics(appliance: Served, admin: Admin) -> None:
    admin.create_topics([NewTopic("follows", 2), NewTopic("own", configs={"segment.ms": "5d"})])
    admin.alter_configs({BROKER: {"topic.segment.ms": 100, "topic.retention.ms": "3d"}})
    wait_until(
        lambda: admin.describe_configs("follows")["follows"]["segment.ms"] == 100,
        "the topic has the new default",
    )
    assert admin.describe_configs("own")["own"]["segment.ms"] == 5 * 86_400_000
    with Producer(appliance.address, acks="all") as producer:
        producer.send("follows", b"x", partition=0).result(timeout=60)
        wait_until(  # 100 ms later, although nothing follows
            lambda: (
                admin.describe_topics("follows")["follows"]["partitions"][0]["segments"] == 1
                and _is_sealed(admin, producer)
            ),
            "the segment is sealed by the new default",
        )


def _is_sealed(admin: Admin, producer: Producer) -> bool:
    producer.send("follows", b"y", partition=0).result(timeout=60)
    return bool(admin.describe_topics("follows")["follows"]["partitions"][0]["segments"] > 1)


def test_a_transaction_may_ask_for_no_more_than_the_new_timeout(
    appliance: Served, admin: Admin
) -> None:
    def begin(name: str) -> None:
        with Producer(
            appliance.address, transactional_id=name, transaction_timeout_ms=60_000
        ) as producer:
            producer.init_transactions()

    begin("before")
    admin.alter_configs({BROKER: {"transaction.max.timeout.ms": "30s"}})
    with pytest.raises(TailraceError, match="30000"):
        begin("after")


def test_a_process_that_hangs_is_killed_after_the_new_time(appliance: Served, admin: Admin) -> None:
    """The new time holds for the one process that is stopped: another that only waits for the
    processor is not to be killed, nor one that starts.
    """
    mark, worker = len(appliance.log), pids(admin)["worker-0"]
    os.kill(worker, signal.SIGSTOP)
    admin.alter_configs({BROKER: {"hang_timeout_ms": 4_000}})
    appliance.wait_for(f"hangs process=worker-0 pid={worker}", mark)
    admin.alter_configs({BROKER: {"hang_timeout_ms": None}})
    wait_until(lambda: pids(admin)["worker-0"] != worker, "the worker is restarted")


# ---- too large -----------------------------------------------------------------------------------


def test_a_change_without_room_is_refused_and_the_appliance_goes_on(
    appliance: Served, admin: Admin
) -> None:
    """Once it were in the catalog, neither this run nor a later start could publish it."""
    rules = [f"user={'u' * 80}{i} producer_byte_rate=1000000" for i in range(360)]
    appliance.config.write_text(f"groups.max = 1000\nquotas = {json.dumps(rules)}\n")
    assert admin.reload_config()["changed"] == ["quotas"]
    groups = [f"group={'g' * 60}{i} share.auto.offset.reset=latest" for i in range(280)]
    with pytest.raises(InvalidSettingError, match=r"with this change .* shorten quotas"):
        admin.alter_configs({BROKER: {"kafka.group.settings": groups}})
    assert admin.describe_configs(BROKER)[BROKER]["kafka.group.settings"].value == []
    appliance.config.write_text("groups.max = 1000\n")
    admin.reload_config()
    admin.alter_configs({BROKER: {"kafka.group.settings": groups}})
    appliance.config.write_text(f"groups.max = 1000\nquotas = {json.dumps(rules)}\n")
    assert "too large beside" in admin.reload_config()["errors"][0]


def test_a_reload_names_what_config_set_hides(appliance: Served, admin: Admin) -> None:
    admin.alter_configs({BROKER: {"groups.max": 50}})
    appliance.config.write_text("groups.max = 20\n")
    out = run(None, "reload", "--bootstrap", appliance.address).stdout.decode()
    assert "changed: nothing" in out
    assert "overridden by `config set`: groups.max; to use the configuration's: " in out
    assert "tailrace config unset groups.max" in out
