"""The installed service under a systemd that is really booted: `tailrace install`, the units, the
socket's group, watchdog, restarts, a second instance, `tailrace uninstall`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.kit.hosts.booted_systemd import (
    CHECKOUT,
    PREFIX,
    PROGRAM,
    BootedSystemd,
    booted_systemd,
    install_program,
    namespaces_work,
)
from tests.kit.processes import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not namespaces_work(), reason="needs root, systemd and namespaces"),
    pytest.mark.slow_because("a systemd is booted, and services are started under it"),
    pytest.mark.xdist_group("booted systemd"),
]
SOCKET = "ipc:///run/tailrace/tailrace.sock"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedSystemd]:
    """A host on which the service was installed."""
    with booted_systemd(tmp_path_factory.mktemp("host")) as booted:
        install_program(booted)
        booted.run(PROGRAM, "install")
        yield booted


def start(host: BootedSystemd, unit: str, **properties: str) -> None:
    """Start a unit, with properties as a drop-in."""
    text = "[Service]\n" + "".join(f"{name}={value}\n" for name, value in properties.items())
    host.run("mkdir", "-p", f"/run/systemd/system/{unit}.service.d")
    host.run("tee", f"/run/systemd/system/{unit}.service.d/test.conf", stdin=text)
    host.systemctl("daemon-reload")
    host.systemctl("reset-failed")
    host.systemctl("restart", unit)


@pytest.fixture
def served(host: BootedSystemd) -> Iterator[BootedSystemd]:
    """The host with the service started."""
    start(host, "tailrace")
    yield host
    host.systemctl("stop", "tailrace")


def child(host: BootedSystemd, name: str) -> str:
    """The pid of a process of the service, "" if there is none."""
    return host.run("pgrep", "-x", name, status=None).stdout.strip()


def test_a_second_install_changes_nothing(host: BootedSystemd) -> None:
    done = host.run(PROGRAM, "install")
    assert "nothing changed: everything is installed" in done.stderr
    assert host.run("stat", "-c", "%U:%G %a", "/etc/tailrace/tailrace.toml").stdout.split() == [
        "root:tailrace",
        "640",
    ]
    assert host.run("stat", "-c", "%U %a", "/var/lib/tailrace").stdout.split() == [
        "tailrace",
        "700",
    ]


def test_systemd_finds_nothing_wrong_with_the_units(host: BootedSystemd) -> None:
    units = [
        f"tailrace{name}{suffix}"
        for name in ("", "-verify", "-backup")
        for suffix in (".service", "@x.service")
    ]
    timers = [
        f"tailrace-{name}{instance}.timer"
        for name in ("verify", "backup")
        for instance in ("", "@x")
    ]
    done = host.run("systemd-analyze", "verify", *units, *timers)
    ours = [line for line in done.stderr.splitlines() if "tailrace" in line]
    assert ours == []


def test_it_serves_stores_as_its_user_verifies_and_stops_cleanly(served: BootedSystemd) -> None:
    assert served.property("tailrace", "StatusText").startswith(
        f"serving on tcp://127.0.0.1:7420, {SOCKET}"
    )
    served.run("tailrace", "topic", "create", "orders")
    served.run("tailrace", "produce", "orders", stdin="one\ntwo\n")
    consumed = served.run("tailrace", "consume", "orders", "--from-beginning")
    assert consumed.stdout == "one\ntwo\n"
    health = "import urllib.request as u; u.urlopen('http://127.0.0.1:7400/health/ready')"
    served.run(f"{PREFIX}/bin/python3", "-c", health)
    assert "ready address=tcp" in served.run("journalctl", "-u", "tailrace").stdout
    by_field = ["journalctl", "-u", "tailrace", "TAILRACE_EVENT=ready", "-o", "json", "-n", "1"]
    ready = json.loads(served.run(*by_field).stdout)
    assert (ready["TAILRACE_PROCESS"], ready["PRIORITY"]) == ("tr-supervisor-0", "6")
    assert ready["TAILRACE_ADDRESS"].startswith("tcp://127.0.0.1:7420")
    served.systemctl("start", "tailrace-verify.service")
    assert served.property("tailrace-verify.service", "Result") == "success"
    served.systemctl("start", "tailrace-backup.service")
    assert "no backup is made" in served.run("journalctl", "-u", "tailrace-backup").stdout
    served.run("install", "-d", "-o", "tailrace", "-m", "0700", "/var/backups/tailrace")
    served.run(
        "tee",
        "/etc/tailrace/conf.d/backup.toml",
        stdin='[backup]\ntarget = "/var/backups/tailrace/main"\n',
    )
    served.systemctl("start", "tailrace-backup.service")
    assert served.property("tailrace-backup.service", "Result") == "success"
    served.run(
        "setpriv", "--reuid=tailrace", "--regid=tailrace", "--clear-groups",
        "tailrace", "backup", "verify", "/var/backups/tailrace/main",
    )  # fmt: skip
    served.run("rm", "-r", "/etc/tailrace/conf.d/backup.toml", "/var/backups/tailrace")
    served.systemctl("stop", "tailrace")
    assert served.property("tailrace", "Result") == "success"
    assert served.property("tailrace", "ExecMainStatus") == "0"
    assert served.run("ls", "/dev/shm").stdout == ""


def test_a_reload_applies_settings_and_the_service_stays(served: BootedSystemd) -> None:
    main = served.property("tailrace", "MainPID")
    served.run("tee", "/etc/tailrace/conf.d/reload.toml", stdin='log_level = "debug"\n')

    def differences() -> dict[str, dict[str, str]]:
        """Name -> row, of the settings in which file and appliance differ."""
        done = served.run("tailrace", "config", "diff", "--json", status=None)
        rows = {row["name"]: row for row in json.loads(done.stdout)}
        assert done.returncode == (1 if rows else 0), done.stderr
        return rows

    row = differences()["log_level"]
    assert (row["running"], row["file"], row["with"]) == ("info", "debug", "a reload")
    served.systemctl("reload", "tailrace")
    wait_until(lambda: "log_level" not in differences(), "the running appliance has the new level")
    served.wait_for("tailrace", "ActiveState", "active")
    assert served.property("tailrace", "MainPID") == main
    served.run("rm", "/etc/tailrace/conf.d/reload.toml")
    row = differences()["log_level"]
    assert (row["running"], row["file"]) == ("debug", "info")
    served.systemctl("reload", "tailrace")
    wait_until(lambda: "log_level" not in differences(), "the default is in force again")


def test_a_credential_of_the_host_is_the_consoles_token(host: BootedSystemd) -> None:
    token = "a-token-of-the-operator"
    host.run("mkdir", "-p", "-m", "0700", "/etc/credstore")
    host.run("tee", "/etc/credstore/tailrace.console.token", stdin=f"{token}\n")
    start(host, "tailrace")
    program = (
        "import sys, urllib.request as u\n"
        "u.urlopen('http://127.0.0.1:7400/')\n"
        "u.urlopen(u.Request('http://127.0.0.1:7400/api/change/create-topic', b'{}', headers={\n"
        "    'Content-Type': 'application/json', 'Authorization': 'Bearer ' + sys.argv[1]}))\n"
    )

    def answer(given: str) -> str:
        return host.run(f"{PREFIX}/bin/python3", "-c", program, given, status=None).stderr

    # The page has its own pace: the service is ready when it takes records.
    wait_until(lambda: "HTTP Error 403" in answer("another-token"), "another token is refused")
    assert "HTTP Error 400" in answer(token)  # the change names no topic
    host.run("test", "-e", "/var/lib/tailrace/console.token", status=1)
    host.run("rm", "/etc/credstore/tailrace.console.token")
    host.systemctl("stop", "tailrace")


def test_users_of_the_group_use_the_socket_and_others_are_told_why_not(
    served: BootedSystemd,
) -> None:
    served.run("useradd", "--no-create-home", "alice")
    served.run("useradd", "--no-create-home", "--groups", "tailrace", "bob")

    def list_topics(user: str, status: int) -> str:
        command = ["runuser", "-u", user, "--", "tailrace", "topic", "list", "--bootstrap", SOCKET]
        return served.run(*command, status=status).stderr

    list_topics("bob", 0)
    refused = list_topics("alice", 3)
    assert "permission denied: user alice may not write to /run/tailrace/tailrace.sock" in refused
    assert "group tailrace and has mode 0660" in refused


def test_a_process_that_hangs_is_restarted_while_the_service_stays(host: BootedSystemd) -> None:
    start(host, "tailrace", Environment="TAILRACE_HANG_TIMEOUT_MS=2000")
    main = host.property("tailrace", "MainPID")
    worker = child(host, "tr-worker-0")
    host.run("kill", "-STOP", worker)
    wait_until(lambda: child(host, "tr-worker-0") not in ("", worker), "the worker is replaced")
    host.wait_for("tailrace", "StatusText", f"serving on tcp://127.0.0.1:7420, {SOCKET}")
    assert host.property("tailrace", "MainPID") == main
    host.systemctl("stop", "tailrace")


def test_systemds_watchdog_ends_a_supervisor_that_hangs_and_the_service_returns(
    host: BootedSystemd,
) -> None:
    start(host, "tailrace", WatchdogSec="3")
    main = host.property("tailrace", "MainPID")
    host.run("tailrace", "topic", "create", "kept", "--if-not-exists")
    host.run("tailrace", "produce", "kept", stdin="one\n")
    host.run("kill", "-STOP", main)
    wait_until(lambda: host.property("tailrace", "NRestarts") == "1", "systemd restarts it")
    host.wait_for("tailrace", "ActiveState", "active")
    assert host.property("tailrace", "MainPID") != main
    assert host.run("tailrace", "consume", "kept", "--from-beginning").stdout == "one\n"
    host.systemctl("stop", "tailrace")


def test_a_killed_supervisor_is_restarted(served: BootedSystemd) -> None:
    main = served.property("tailrace", "MainPID")
    served.systemctl("kill", "--kill-whom=main", "--signal=KILL", "tailrace")
    wait_until(lambda: served.property("tailrace", "NRestarts") == "1", "systemd restarts it")
    served.wait_for("tailrace", "ActiveState", "active")
    assert served.property("tailrace", "MainPID") != main


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ("TAILRACE_FRONTS=none", 2),
        ("TAILRACE_HTTP_LISTEN= TAILRACE_LISTEN=tcp://127.0.0.1:7999", 72),
        ("TAILRACE_DATA_DIRS=/proc/tailrace", 73),
        ("TAILRACE_RING_BYTES=64GiB", 75),
    ],
)
def test_what_the_next_start_would_not_mend_is_not_restarted(
    host: BootedSystemd, environment: str, status: int
) -> None:
    listener = "import socket,time\ns=socket.create_server(('127.0.0.1', 7999))\ntime.sleep(600)\n"
    if status == 72:
        host.run("systemd-run", "--unit=other", f"{PREFIX}/bin/python3", "-c", listener)
    unit = "/run/systemd/system/tailrace.service.d/test.conf"
    host.run("mkdir", "-p", unit.rpartition("/")[0])
    host.run("tee", unit, stdin=f"[Service]\nEnvironment={environment}\n")
    host.systemctl("daemon-reload")
    host.systemctl("start", "tailrace", status=1)
    assert host.property("tailrace", "ExecMainStatus") == str(status)
    assert host.property("tailrace", "NRestarts") == "0"
    assert host.property("tailrace", "ActiveState") == "failed"
    if status == 72:
        host.systemctl("stop", "other")


def test_with_a_socket_unit_the_first_client_starts_it_and_a_restart_refuses_nobody(
    host: BootedSystemd,
) -> None:
    start(host, "tailrace")
    host.systemctl("stop", "tailrace")
    host.systemctl("start", "tailrace.socket")
    assert host.property("tailrace", "ActiveState") == "inactive"
    create = ["tailrace", "topic", "create", "activated", "--if-not-exists"]
    wait_until(lambda: host.run(*create, status=None).returncode == 0, "a client is served")
    assert host.property("tailrace", "ActiveState") == "active"
    host.run("systemctl", "--no-block", "stop", "tailrace")
    host.wait_for("tailrace", "ActiveState", "inactive")
    for address in (SOCKET, "tcp://127.0.0.1:7420"):
        host.run("tailrace", "produce", "activated", "--bootstrap", address, stdin="one\n")
        host.systemctl("kill", "--kill-whom=main", "--signal=KILL", "tailrace")
    consume = ["tailrace", "consume", "activated", "--from-beginning"]
    wait_until(lambda: host.run(*consume, status=None).stdout == "one\none\n", "both are there")
    assert host.run("stat", "-c", "%U:%G %a", "/run/tailrace/tailrace.sock").stdout.split() == [
        "tailrace:tailrace",
        "660",
    ]
    host.systemctl("stop", "tailrace.socket", "tailrace")


def test_a_second_instance_serves_beside_the_first(served: BootedSystemd) -> None:
    done = served.run("tailrace", "install", "--instance", "staging")
    assert "systemctl enable --now tailrace@staging" in done.stderr
    served.systemctl("start", "tailrace@staging")
    for address in ("tcp://127.0.0.1:7520", "ipc:///run/tailrace-staging/tailrace.sock"):
        served.run("tailrace", "topic", "list", "--bootstrap", address)
    served.run("tailrace", "topic", "create", "there", "--bootstrap", "tcp://127.0.0.1:7520")
    assert "there" not in served.run("tailrace", "topic", "list").stdout
    served.run("tailrace", "uninstall", "--instance", "staging", "--purge", "--yes")
    assert served.property("tailrace@staging", "ActiveState") == "inactive"
    served.run("test", "-e", "/var/lib/tailrace-staging", status=1)
    assert served.property("tailrace", "ActiveState") == "active"


def test_uninstall_keeps_the_data_unless_it_is_purged(host: BootedSystemd) -> None:
    start(host, "tailrace")
    host.run("tailrace", "topic", "create", "stays", "--if-not-exists")
    done = host.run(PROGRAM, "uninstall")
    assert "kept: /etc/tailrace/tailrace.toml, /var/lib/tailrace" in done.stderr
    assert host.systemctl("status", "tailrace", status=4) == ""
    assert "nothing is installed here" in host.run(PROGRAM, "uninstall").stderr
    host.run(PROGRAM, "install")
    start(host, "tailrace")
    assert "stays" in host.run("tailrace", "topic", "list").stdout
    host.run(PROGRAM, "uninstall", "--purge", status=2)  # nobody can be asked
    host.run(PROGRAM, "uninstall", "--purge", "--yes")
    for path in ("/etc/tailrace", "/var/lib/tailrace", "/var/lib/tailrace-install"):
        host.run("test", "-e", path, status=1)
    host.run("id", "tailrace", status=1)
    left = host.run("find", "/etc", "/usr/local", "-name", "*tailrace*").stdout.split()
    assert [path for path in left if CHECKOUT not in path] == []
    host.run(PROGRAM, "install")  # for the tests that come behind this one
