"""`tailrace doctor --bundle`: secrets and payloads that were planted are in no file of it."""

from __future__ import annotations

import io
import json
import os
import pathlib
import tarfile

import pyarrow as pa
import pytest

from appliance.observe.console.access.token import ensure_token
from tailrace import Admin, NewTopic, Producer, TailraceError
from tailrace.embedded_appliance import start_embedded
from tests.kit.appliances.console import console_of
from tests.kit.cli import run
from tests.kit.processes import HANG_LIMIT_S

PLANTED = "hunter2-planted"


def files_of(path: pathlib.Path) -> dict[str, str]:
    data = path.read_bytes()
    if path.suffix == ".zst":
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as raw:
            data = raw.read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = {}
        for entry in archive:
            content = archive.extractfile(entry)
            assert content is not None
            found[entry.name.partition("/")[2]] = content.read().decode()
        return found


def test_a_bundle_has_what_support_needs_and_nothing_of_the_users(
    tmp_path: pathlib.Path,
) -> None:
    config = tmp_path / "tailrace.toml"
    config.write_text(f'slots = "{PLANTED}"\nhttp.hosts = ["u:{PLANTED}@host"]\n{PLANTED} = 1\n')
    running = start_embedded(
        data_dir=str(tmp_path / "data"), settings={"http.listen": "127.0.0.1:0"}
    )
    try:
        console_of(running)
        token = ensure_token(running.data_dir)
        with Admin(running.address) as admin, Producer(running.address) as producer:
            admin.create_topics(NewTopic("orders"))
            producer.send(
                "orders", f"value {PLANTED}".encode(), key=f"key {PLANTED}".encode(),
                headers=[("h", f"header {PLANTED}".encode())],
            ).result(HANG_LIMIT_S)  # fmt: skip
            with pytest.raises(TailraceError) as refused:
                admin.create_topics(NewTopic(f"{PLANTED} is no name"))
            with pytest.raises(TailraceError):
                admin.alter_topics({"orders": {"retention.ms": f"{PLANTED}"}})
        (tmp_path / "data" / "quarantine").mkdir()  # so that doctor finds something
        (tmp_path / "data" / "quarantine" / "orders-0-0-0.json").write_text("{}")
        path = tmp_path / "support.tar.gz"
        done = run(
            running, "doctor", "--bundle", str(path), "--log", running.log_path, "--config",
            str(config), status=1,
        )  # fmt: skip
        assert b"look at it, then send it" in done.stderr
        again = run(running, "doctor", "--bundle", str(path), status=2)
        assert b"which exists" in again.stderr
    finally:
        assert running.stop() == 0
    assert path.stat().st_mode & 0o777 == 0o600
    files = files_of(path)
    whole = "\n".join(f"{name}\n{text}" for name, text in files.items())
    for secret in (PLANTED, token):
        assert secret not in whole, [name for name, text in files.items() if secret in text]
    assert {"doctor.json", "versions.json", "settings.json", "status.json", "metrics.txt",
            "running_settings.json", "topics.json", "log.txt", "host/cpu.txt",
            "processes/front-0.limits.txt"} <= set(files)  # fmt: skip
    assert "tailrace_up 1.0" in files["metrics.txt"]
    assert "orders-0" in files["host/data_dir_0.txt"]
    assert json.loads(files["topics.json"])["orders"]["partitions"]
    problems = [row["problem"] for row in json.loads(files["settings.json"]) if "problem" in row]
    assert any("slots is (text)" in problem for problem in problems)
    assert "ready address=tcp" in files["log.txt"]
    assert refused.value.request_id == "" or refused.value.request_id in files["log.txt"]


def test_without_an_appliance_the_host_and_the_settings_are_in_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "support.tar.zst"
    (tmp_path / "log").write_text("")
    run(
        None, "doctor", "--bundle", str(path), "--log", str(tmp_path / "log"), "--no-config",
        status=1,
    )  # fmt: skip
    files = files_of(path)
    assert {"doctor.json", "settings.json", "host/cpu.txt", "missing.txt"} <= set(files)
    assert "status.json" not in files
    assert sorted(os.listdir(tmp_path)) == ["log", "support.tar.zst"]


def test_a_bundle_of_another_form_is_refused(tmp_path: pathlib.Path) -> None:
    done = run(None, "doctor", "--bundle", str(tmp_path / "x.zip"), status=2)
    assert b"ends with .tar.gz or .tar.zst" in done.stderr
