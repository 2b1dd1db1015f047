"""`tailrace serve --check` says what a start would do or be refused for, and does nothing; logs
under systemd's journal, and by level.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from appliance.observe.checks.doctor_checks import Level, host_checks
from appliance.observe.checks.serve_dry_run import StartReport, check_start
from appliance.supervise.processes.restart_policy import ExitCode
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.cli import TAILRACE
from tests.kit.peers.bearer_tokens import secret_entry, write_keys
from tests.kit.processes import HANG_LIMIT_S, wait_until

QUIET = ("http.listen", "")


def check(
    *flags: tuple[str, Any], config: pathlib.Path | None = None, **environment: str
) -> StartReport:
    return check_start(str(config) if config else None, environment, lambda: list(flags))


def problem(report: StartReport) -> str:
    """The sentence of the first refusal."""
    return next(found.detail for found in report.checks if found.level is Level.PROBLEM)


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`tailrace serve`, which is expected to end by itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    return subprocess.run(
        [TAILRACE, "serve", *arguments],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )


def test_it_shows_every_setting_with_where_it_came_from_and_makes_nothing(
    tmp_path: pathlib.Path,
) -> None:
    config = tmp_path / "tailrace.toml"
    config.write_text('slots = 100\n[flush]\nlinger_ms = 3\nbatch_size = "2MiB"\n')
    arguments = [
        "--check",
        "--config",
        str(config),
        "--data-dir",
        str(tmp_path / "data"),
        "--listen",
        "tcp://127.0.0.1:0",
    ]
    environment = {
        "TAILRACE_FLUSH_LINGER_MS": "4",
        "TAILRACE_HTTP_LISTEN": "127.0.0.1:0",
        "TAILRACE_CONTEXT": "any",
    }
    done = serve(*arguments, "--set", "http.listen=", "--json", **environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = {row["name"]: (row["value"], row["source"]) for row in report["settings"]}
    assert found["slots"] == (100, str(config))
    assert found["flush.batch_size"] == (2 << 20, str(config))
    assert found["flush.linger_ms"] == (4, "TAILRACE_FLUSH_LINGER_MS")
    assert found["http.listen"] == ("", "command line")
    assert found["data_dirs"] == ([str(tmp_path / "data")], "command line")
    assert found["ring_bytes"] == (64 << 20, "default")
    assert report["exit_status"] == 0
    assert {row["level"] for row in report["checks"]} <= {"ok", "warning"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tailrace.toml"]
    text = serve(*arguments, **environment).stdout
    assert "it would serve; nothing was started or written" in text
    assert re.search(r"flush\.linger_ms +4 +TAILRACE_FLUSH_LINGER_MS", text)
    assert "--json needs --check" in serve("--json").stderr


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(["--set", "ring_byte=1"], {}), (["--set", "ring_bytes"], {}),
    ([], {"TAILRACE_RING_BYTE": "1"}), (["--config", "/nowhere"], {}),
     (["--set", "log_level=loud"], {}), (["--set", "credit_bytes=1MiB"], {}),
     (["--data-dir", "/nowhere/a,/nowhere/b"], {}),
     (["--data-dir", "/nowhere/a", "--set", "data_dirs=/nowhere/a,/nowhere/b"], {}),
     (["--listen", "tcp://127.0.0.1:0", "--set", "listen=ipc:///nowhere"], {})],
)  # fmt: skip
def test_a_wrong_setting_is_the_same_refusal_as_that_of_serve(
    arguments: list[str], environment: dict[str, str]
) -> None:
    real, checked = (
        serve(*arguments, **environment),
        serve("--check", "--json", *arguments, **environment),
    )
    assert real.returncode == checked.returncode == 2
    sentence = json.loads(checked.stdout)["checks"][-1]["detail"]
    assert sentence in real.stderr


def test_the_kafka_port_and_its_certificate_are_checked(tmp_path: pathlib.Path) -> None:
    place = (("data_dirs", [str(tmp_path / "data")]), ("listen", ["tcp://127.0.0.1:0"]), QUIET)
    report = check(*place, ("kafka.listen", ["127.0.0.1:0"]))
    assert report.exit_status == 0
    [found] = [row for row in report.checks if row.name == "kafka.listen 127.0.0.1:0"]
    assert found.detail == "PLAINTEXT, any free port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        report = check(*place, ("kafka.listen", [address]))
    assert report.exit_status == ExitCode.ADDRESS_IN_USE
    assert f"cannot listen on {address}" in problem(report)
    missing = str(tmp_path / "none.pem")
    report = check(
        *place, ("kafka.listen", ["SSL://127.0.0.1:0"]), ("kafka.tls.certificate", missing)
    )
    assert report.exit_status == ExitCode.CONFIG
    assert f"{missing} (kafka.tls.certificate)" in problem(report)
    (tmp_path / "none.pem").write_text("no certificate")
    report = check(
        *place, ("kafka.listen", ["SSL://127.0.0.1:0"]), ("kafka.tls.certificate", missing)
    )
    assert "cannot be used" in problem(report)


def test_the_keys_of_tokens_are_checked(tmp_path: pathlib.Path) -> None:
    keys = tmp_path / "keys.json"
    place = (
        ("data_dirs", [str(tmp_path / "data")]), ("listen", ["tcp://127.0.0.1:0"]), QUIET,
        ("security.enabled", "true"), ("kafka.listen", ["127.0.0.1:0"]),
        ("kafka.sasl.enabled.mechanisms", ["OAUTHBEARER"]),
        ("kafka.sasl.oauthbearer.expected.audience", ["tailrace"]),
        ("kafka.sasl.oauthbearer.jwks", str(keys)),
    )  # fmt: skip
    report = check(*place)
    assert report.exit_status == ExitCode.CONFIG
    assert f"{keys} (kafka.sasl.oauthbearer.jwks) cannot be used" in problem(report)
    write_keys(keys, secret_entry(bytes(range(32))))
    report = check(*place)
    assert report.exit_status == 0
    [found] = [row for row in report.checks if row.name == "kafka token keys"]
    assert found.detail == f"{keys}, keys: 1"


def test_what_is_in_use_is_the_same_refusal_as_that_of_serve(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    for arguments, status in (
        (
            ["--data-dir", appliance.data_dir, "--listen", "tcp://127.0.0.1:0"],
            ExitCode.DATA_UNUSABLE,
        ),
        (
            ["--data-dir", str(tmp_path / "data"), "--listen", appliance.address],
            ExitCode.ADDRESS_IN_USE,
        ),
    ):
        checked = serve("--check", "--json", "--set", "http.listen=", *arguments)
        report = json.loads(checked.stdout)
        assert checked.returncode == report["exit_status"] == status
        sentence = next(row["detail"] for row in report["checks"] if row["level"] == "problem")
        assert not (tmp_path / "data").exists()
        real = serve("--set", "http.listen=", *arguments)
        assert real.returncode == status
        assert sentence.partition(". Stop")[0] in real.stderr
        shutil.rmtree(tmp_path / "data", ignore_errors=True)


@pytest.mark.parametrize(
    ("cores", "flags", "said"),
    [
        ({0, 1}, [], "sleep at once: 1 of 1 workers share cores with others"),
        (
            set(range(8)),
            [],
            "look for work for 100 us before they sleep: each front, worker and flusher has a core",
        ),
        (
            set(range(8)),
            [("fronts", 2), ("cores", [2, 3, 4, 5, 6, 7])],
            "sleep at once: 2 cores for 3 fronts and flushers",
        ),
        (
            {0, 1},
            [("busy_poll_us", 40)],
            "look for work for 40 us before they sleep: as busy_poll_us says",
        ),
    ],
)
def test_what_becomes_of_busy_poll_us_is_said(
    cores: set[int],
    flags: list[tuple[str, object]],
    said: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    report = check_start(None, {}, lambda: [("data_dirs", [str(tmp_path / "data")]), *flags])
    assert (
        next(check.detail for check in report.checks if check.name == "busy poll")
        == f"fronts and workers {said}"
    )
    doctor = next(check.detail for check in host_checks([]) if check.name == "cores")
    assert f"busy_poll_us is {100 if len(cores) > 2 else 0} with the default settings: " in doctor


def test_directories_memory_and_addresses_that_cannot_be_used_are_said(
    tmp_path: pathlib.Path,
) -> None:
    data, free = ("data_dirs", [str(tmp_path / "data")]), ("listen", ["tcp://127.0.0.1:0"])
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        report = check(("data_dirs", [str(path)]), free, QUIET)
        assert (report.exit_status, "where a directory belongs" in problem(report)) == (
            ExitCode.DATA_UNUSABLE,
            True,
        )
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert "every user of this host may write" in problem(
        check(("data_dirs", [str(open_to_all)]), free, QUIET)
    )
    used = tmp_path / "used"
    used.mkdir(mode=0o700)
    (used / "journal").touch()
    assert "shows that this directory was used" in problem(
        check(("data_dirs", [str(used)]), free, QUIET)
    )
    too_much = check(data, free, QUIET, ("ring_bytes", 1 << 36))
    assert (too_much.exit_status, "Lower ring_bytes" in problem(too_much)) == (
        ExitCode.SHARED_MEMORY,
        True,
    )
    for address, sentence in (
        ("ipc:///nowhere/at/all.sock", "No such file"),
        ("tcp://no-such-host.invalid:7420", "no such host"),
        ("tcp://192.0.2.1:7420", "cannot listen on tcp://192.0.2.1:7420"),
    ):
        report = check(data, ("listen", [address]), QUIET)
        assert (report.exit_status, sentence in problem(report)) == (
            ExitCode.ADDRESS_IN_USE,
            True,
        ), problem(report)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        report = check(data, free, ("http.listen", f"127.0.0.1:{taken.getsockname()[1]}"))
    assert report.exit_status == 0, "the console is no reason not to serve"
    assert [found.level for found in report.checks if found.name == "console"] == [Level.WARNING]
    assert (
        check(data, ("listen", ["tcp://*:0", f"ipc://{tmp_path}/t.sock"]), QUIET).exit_status == 0
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "open", "used"]


def test_a_full_disk_is_said_and_is_no_refusal(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    start_embedded(data_dir=str(data)).stop()
    assert check(QUIET, ("data_dirs", str(data)), ("listen", "tcp://127.0.0.1:0")).exit_status == 0
    real = os.statvfs

    def full(path: Any) -> Any:
        found = list(real(path))
        if path == str(data):
            found[4] = 1000  # blocks that are free to others than root
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", full)
    report = check(QUIET, ("data_dirs", str(data)), ("listen", "tcp://127.0.0.1:0"))
    assert report.exit_status == 0
    (warning,) = (
        found.detail
        for found in report.checks
        if found.name == f"data directory {data}" and found.level is Level.WARNING
    )
    assert "DISK_FULL" in warning


def test_a_directory_that_the_catalog_lists_and_the_settings_do_not_is_said(
    tmp_path: pathlib.Path,
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    running = start_embedded(
        data_dir=first, auto_create_topics=True, settings={"data_dirs": f"{first},{second}"}
    )
    try:
        with Admin(running.address) as admin:
            admin.create_topics(NewTopic("t", 4))
    finally:
        assert running.stop() == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    report = check(("data_dirs", [first]), ("listen", ["tcp://127.0.0.1:0"]), QUIET)
    assert report.exit_status == ExitCode.CONFIG
    assert f"data_dirs lacks {second} with 2 partitions" in problem(report)
    both = check(("data_dirs", [first, second]), ("listen", ["tcp://127.0.0.1:0"]), QUIET)
    assert both.exit_status == 0
    (tmp_path / "second").rename(tmp_path / "elsewhere")
    lost = check(("data_dirs", [first, second]), ("listen", ["tcp://127.0.0.1:0"]), QUIET)
    assert f"the 2 partitions of {second} are not there: mount its disk" in problem(lost)
    assert "data_dirs lacks" not in problem(lost)
    (tmp_path / "elsewhere").rename(tmp_path / "second")
    assert "2 partitions" in next(
        found.detail for found in both.checks if found.name == f"data directory {first}"
    )
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# ---- logs ----------------------------------------------------------------------------------------


@contextmanager
def logging_to(
    log: pathlib.Path, tmp_path: pathlib.Path, *arguments: str, **environment: str
) -> Iterator[str]:
    """A served appliance whose standard error is `log`; its address."""
    address = f"ipc://{tmp_path}/t.sock"
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TAILRACE_", "JOURNAL_STREAM"))
    }
    command = [
        sys.executable,
        "-P",
        "-m",
        "appliance.supervise.supervisor",
        "--data-dir",
        str(tmp_path / "data"),
        "--listen",
        address,
        *arguments,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**kept, **environment}, stdout=out, stderr=out)
    try:
        with Admin(address) as admin:
            wait_until(lambda: bool(admin.describe_cluster()["console"]), "the console serves")
            console = next(
                p["pid"] for p in admin.describe_cluster()["processes"] if p["name"] == "console"
            )
            os.kill(console, signal.SIGKILL)
            wait_until(lambda: "ended process=console" in log.read_text(), "its end is logged")
        yield address
    finally:
        process.terminate()
        assert process.wait(HANG_LIMIT_S) == 0


def test_under_the_journal_a_line_has_its_priority_and_no_time_of_its_own(
    tmp_path: pathlib.Path,
) -> None:
    log = tmp_path / "log"
    log.touch()
    stream = f"{log.stat().st_dev}:{log.stat().st_ino}"
    with logging_to(log, tmp_path, "--set", "http.listen=127.0.0.1:0", JOURNAL_STREAM=stream):
        pass
    lines = log.read_text().splitlines()
    assert any(line.startswith("<6>process=tr-supervisor-0 ready ") for line in lines)
    assert any(line.startswith("<6>process=tr-console-0 console ") for line in lines)
    assert any(
        line.startswith("<4>process=tr-supervisor-0 ended process=console") for line in lines
    )
    assert not [line for line in lines if not line.startswith("<")], "a line without its priority"


def test_elsewhere_a_line_has_its_time_and_log_level_says_which_there_are(
    tmp_path: pathlib.Path,
) -> None:
    log = tmp_path / "log"
    # A journal's name in the environment, of an output that was redirected since.
    with logging_to(
        log,
        tmp_path,
        "--set",
        "http.listen=127.0.0.1:0",
        "--set",
        "log_level=warning",
        JOURNAL_STREAM="1:2",
    ):
        pass
    lines = log.read_text().splitlines()
    assert all(
        re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (WARNING|ERROR) process=tr-", line)
        for line in lines
    ), lines
