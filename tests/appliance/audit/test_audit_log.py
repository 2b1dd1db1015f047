"""The audit log's files: whatever is changed, cut, moved or removed is found; a disk that fails
leaves whole lines only.
"""

from __future__ import annotations

import os
import pathlib
import random
import socket
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from appliance.audit.audit_log import HEAD, AuditLog, audit_files, read_key
from appliance.audit.verification import read_events, verify
from appliance.control.audit_writer import AuditWriter
from tests.kit.cli import run

KEY = b"0123456789abcdef-key"


def opened(path: pathlib.Path, **options: Any) -> AuditLog:
    given: dict[str, Any] = {"key": b"", "file_bytes": 2_000, "files_max": 0}
    return AuditLog(str(path), **{**given, **options}, wall_us=lambda: 7)


def filled(path: pathlib.Path, count: int = 40, **options: Any) -> None:
    log = opened(path, **options)
    for number in range(count):
        log.append([{"event": "request", "user": f"User:{number}", "api": "DELETE_TOPICS"}])
    log.close()


@pytest.mark.parametrize("key", [b"", KEY])
def test_a_log_that_nobody_touched_is_whole_over_files_and_restarts(
    tmp_path: pathlib.Path, key: bytes
) -> None:
    filled(tmp_path, key=key)
    filled(tmp_path, key=key)
    found = verify(str(tmp_path), key)
    assert (found.findings, found.lines, found.first, found.last) == ([], 80, 1, 80)
    assert found.files > 3
    assert [row["seq"] for row in read_events(str(tmp_path))] == list(range(1, 81))
    assert all(os.stat(tmp_path / name).st_mode & 0o777 == 0o600 for name in os.listdir(tmp_path))


def _file(path: pathlib.Path, place: int) -> pathlib.Path:
    return path / audit_files(str(path))[place]


def _edit(place: int, change: Callable[[bytes], bytes]) -> Callable[[pathlib.Path], None]:
    def act(path: pathlib.Path) -> None:
        file = _file(path, place)
        file.write_bytes(change(file.read_bytes()))

    return act


def _without_line(data: bytes, number: int) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[number]
    return b"".join(lines)


DAMAGE: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
    "a changed word": (_edit(1, lambda d: d.replace(b"User:1", b"User:x", 1)), "was changed"),
    "a removed line": (_edit(1, lambda d: _without_line(d, 2)), "lines are missing"),
    "two lines exchanged": (
        _edit(0, lambda d: b"".join([*reversed(d.splitlines(keepends=True)[:2]),
                                     *d.splitlines(keepends=True)[2:]])), "lines are missing"
    ),
    "a cut end": (_edit(-1, lambda d: _without_line(d, -1)), "the end was cut"),
    "a torn end": (_edit(-1, lambda d: d[:-10]), "the line has no end"),
    "a removed first file": (lambda p: _file(p, 0).unlink(), "files before it were removed"),
    "a removed file": (lambda p: _file(p, 2).unlink(), "a file before it is missing"),
    "a removed last file": (lambda p: _file(p, -1).unlink(), "the end was cut"),
    "a foreign line": (_edit(1, lambda d: b"{}\n" + d), "no line of an audit log"),
    "a removed head": (lambda p: (p / HEAD).unlink(), "is missing"),
    "an emptied head": (lambda p: _empty(p / HEAD), "is damaged"),
    "a forged head": (
        lambda p: _replace(p / HEAD, b'{"seq":3,"hash":"' + b"0" * 64 + b'","mac":"1"}'),
        "was changed, or was written with another key",
    ),
}  # fmt: skip


def _empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def _replace(path: pathlib.Path, data: bytes) -> None:
    path.write_bytes(data)


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("key", [b"", KEY])
def test_whatever_is_done_to_a_log_is_found(tmp_path: pathlib.Path, what: str, key: bytes) -> None:
    filled(tmp_path, key=key)
    damage, sentence = DAMAGE[what]
    damage(tmp_path)
    findings = verify(str(tmp_path), key).findings
    assert any(sentence in finding for finding in findings), findings


def test_any_flipped_bit_is_found(tmp_path: pathlib.Path) -> None:
    filled(tmp_path, 10, key=KEY)
    rng = random.Random(3)
    for name in audit_files(str(tmp_path)):
        original = (tmp_path / name).read_bytes()
        for _ in range(60):
            place = rng.randrange(len(original))
            changed = bytearray(original)
            changed[place] ^= 1 << rng.randrange(8)
            (tmp_path / name).write_bytes(changed)
            assert verify(str(tmp_path), KEY).findings, (name, place)
        (tmp_path / name).write_bytes(original)
    assert not verify(str(tmp_path), KEY).findings


def test_without_the_key_a_log_cannot_be_written_anew(tmp_path: pathlib.Path) -> None:
    filled(tmp_path, 5, key=KEY)
    for name in os.listdir(tmp_path):
        (tmp_path / name).unlink()
    filled(tmp_path, 5, key=b"")
    assert any("not keyed" in finding for finding in verify(str(tmp_path), KEY).findings)
    filled_elsewhere = tmp_path / "other"
    filled(filled_elsewhere, 5, key=b"another key of some length")
    assert verify(str(filled_elsewhere), KEY).findings


def test_files_that_the_appliance_removes_are_accounted_for(tmp_path: pathlib.Path) -> None:
    filled(tmp_path, 100, files_max=3)
    assert len(audit_files(str(tmp_path))) == 3
    assert verify(str(tmp_path), b"").findings == []
    assert next(iter(read_events(str(tmp_path))))["seq"] > 50
    _file(tmp_path, 0).unlink()
    assert verify(str(tmp_path), b"").findings


def test_a_torn_line_is_cut_at_the_next_start_and_reported(tmp_path: pathlib.Path) -> None:
    filled(tmp_path, 3)
    with open(_file(tmp_path, -1), "ab") as file:
        file.write(b'{"seq":4,"eve')
    filled(tmp_path, 1)
    assert verify(str(tmp_path), b"").findings == []
    events = list(read_events(str(tmp_path)))
    assert [row["event"] for row in events[3:]] == ["log_repaired", "request"]
    assert events[3]["cut_bytes"] == 13


def test_an_append_that_fails_in_its_middle_leaves_whole_lines(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path)
    log.append([{"event": "one"}])
    real = os.write

    def half(fd: int, data: Any) -> int:
        real(fd, bytes(data)[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        log.append([{"event": "two"}, {"event": "three"}])
    monkeypatch.undo()
    log.append([{"event": "four"}])
    log.close()
    assert [row["event"] for row in read_events(str(tmp_path))] == ["one", "four"]
    assert verify(str(tmp_path), b"").findings == []


def test_a_sync_that_fails_is_no_success(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path)
    log.append([{"event": "one"}])

    def failing(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(OSError, match="Input"):
        log.append([{"event": "two"}])
    monkeypatch.undo()
    log.close()
    assert verify(str(tmp_path), b"").findings == []
    assert verify(str(tmp_path), b"").last == 1


def test_keys_come_from_files_and_credentials_and_short_ones_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert read_key(str(tmp_path / "key")) == KEY
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_key("credential:key") == KEY
    with pytest.raises(OSError, match="add LoadCredential="):
        read_key("credential:other")
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ValueError, match="at least 16"):
        read_key("credential:key")
    assert read_key("") == b""


def test_the_command_line_verifies_and_lists(tmp_path: pathlib.Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    logs = tmp_path / "audit"
    filled(logs, 30, key=KEY)
    done = run(None, "audit", "verify", str(logs), "--key-file", str(key))
    assert b"30 lines" in done.stdout
    assert b"1 to 30: whole" in done.stdout
    rows = orjson.loads(run(None, "audit", "list", str(logs), "--user", "User:7", "--json").stdout)
    assert [row["seq"] for row in rows] == [8]
    assert b"DELETE_TOPICS" in run(None, "audit", "list", str(logs), "--tail", "2").stdout
    bare = orjson.loads(run(None, "audit", "list", str(logs), "--user", "7", "--json").stdout)
    assert bare == rows
    done = run(None, "audit", "verify", str(logs), status=2)
    assert b"give the file of audit.key_file with --key-file" in done.stderr
    assert b"problem" not in done.stdout
    other = tmp_path / "other"
    other.write_bytes(b"another key of some length")
    done = run(None, "audit", "verify", str(logs), "--key-file", str(other), status=2)
    assert b"no line fits this key" in done.stderr
    run(None, "audit", "verify", str(logs), "--key-file", str(tmp_path / "none"), status=1)
    _file(logs, 0).unlink()
    done = run(None, "audit", "verify", str(logs), "--key-file", str(key), status=1)
    assert b"NOT whole" in done.stdout
    missing = run(None, "audit", "verify", str(tmp_path / "none"), status=1)
    assert b"cannot be read: No such file" in missing.stderr
    assert b"Errno" not in missing.stderr


def test_the_journal_gets_each_line_with_its_fields(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A journal that takes none costs a line of the log and no line of the file."""
    path = str(tmp_path / "journal")
    monkeypatch.setattr("shm.runtime.logs.journal.SOCKET", path)
    settings = {
        "directory": str(tmp_path / "audit"), "key_file": "", "file_bytes": 1 << 20,
        "files_max": 0, "journal": True,
    }  # fmt: skip
    writer = AuditWriter(settings, lambda: 7)
    events = [
        {"event": "login", "user": "User:alice"},
        {"event": "denied", "user": "User:bob", "outcome": "denied", "reason": "two\nlines"},
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(path)
        writer.write({"events": events})
        sent = [journal.recv(1 << 16) for _ in events]
    assert b"SYSLOG_IDENTIFIER=tailrace-audit\n" in sent[0]
    assert b"TAILRACE_AUDIT_EVENT=login\n" in sent[0]
    assert b"TAILRACE_AUDIT_USER=User:alice\n" in sent[0]
    assert b"TAILRACE_AUDIT_SEQ=2\n" in sent[1]
    assert b"TAILRACE_AUDIT_OUTCOME=denied\n" in sent[1]
    lines = next((tmp_path / "audit").glob("audit-*.jsonl")).read_bytes().splitlines()
    for line, datagram in zip(lines, sent, strict=True):
        assert b"MESSAGE=" + line + b"\n" in datagram
        assert b"TAILRACE_AUDIT_HASH=" + orjson.loads(line)["hash"].encode() in datagram
    assert not caplog.records
    writer.write({"events": events})
    assert "audit_not_in_journal" in caplog.text
    assert verify(str(tmp_path / "audit"), b"").findings == []
