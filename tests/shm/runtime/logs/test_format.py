"""Log lines as text, as JSON, and as fields of systemd's journal."""

from __future__ import annotations

import io
import json
import logging
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from shm.runtime.logs.fields import event_and_fields
from shm.runtime.logs.format import (
    LINE_MAX,
    Advice,
    JsonFormatter,
    OneLineFormatter,
    RateLimit,
    line_formatter,
)
from shm.runtime.logs.journal import JournalHandler, encoded
from shm.runtime.logs.slow_operations import SlowOperations


def record(template: str, *arguments: Any, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("tailrace", level, "file.py", 1, template, arguments or None, None)


@pytest.mark.parametrize(
    ("template", "arguments", "event", "fields"),
    [
        ("stopping", (), "stopping", {}),
        ("ended process=%s pid=%d", ("front-0", 7), "ended", {"process": "front-0", "pid": 7}),
        ("x reason=%r", ("it's 100% full",), "x", {"reason": "it's 100% full"}),
        ("x path=%s/%s at=%s:%d", ("a", "b", "h", 1), "x", {"path": "a/b", "at": "h:1"}),
        ("x offsets=%d-%d", (3, 9), "x", {"offsets": "3-9"}),
        ("x by=operator advice='set a=b, c'", (), "x", {"by": "operator", "advice": "set a=b, c"}),
        (
            "internal_error id=%s %s reason=%r",
            ("w.1", "api=6 request=1f", "KeyError: 7"),
            "internal_error",
            {"id": "w.1", "api": "6", "request": "1f", "reason": "KeyError: 7"},
        ),
        ("x mode=%o ids=%x", (448, 255), "x", {"mode": "700", "ids": "ff"}),
        ("of a library: 100%", (), "of", {"detail": "a library: 100%"}),
        ("of %s library", ("another",), "of", {"detail": "another library"}),
        ("wrong %s %s", ("one",), "wrong", {"detail": "%s %s"}),
    ],
)
def test_fields_have_the_names_and_types_of_the_call(
    template: str, arguments: tuple[Any, ...], event: str, fields: dict[str, Any]
) -> None:
    assert event_and_fields(record(template, *arguments)) == (event, fields)


def test_json_is_one_object_a_line_whatever_a_client_has_sent() -> None:
    hostile = 'a\nERROR forged "\u2028\x1b[31m\udcff' + "x" * 2 * LINE_MAX
    line = JsonFormatter("tr-front-0").format(
        record("request_refused client=%s count=%d huge=%d", hostile, 3, 1 << 70)
    )
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    found = json.loads(line)
    assert (found["process"], found["event"], found["level"]) == (
        "tr-front-0",
        "request_refused",
        "info",
    )
    fields = found["fields"]
    assert fields["client"].startswith('a\nERROR forged "\u2028\x1b[31m\\udcff')
    assert len(fields["client"]) < 2 * LINE_MAX
    assert (fields["count"], fields["huge"]) == (3, str(1 << 70))


def test_a_traceback_stays_in_its_line() -> None:
    for formatter in (JsonFormatter("p"), OneLineFormatter("%(message)s")):
        try:
            raise KeyError("x")
        except KeyError as error:
            failed = record("request_failed path=%r", "/", level=logging.ERROR)
            failed.exc_info = (KeyError, error, error.__traceback__)
        assert "KeyError" in formatter.format(failed)
        assert len(formatter.format(failed).splitlines()) == 1


def test_a_warning_gets_its_advice_and_keeps_its_own() -> None:
    known = record("disk_full path=%s", "/data", level=logging.WARNING)
    assert Advice().filter(known)
    assert "advice='free some space" in known.getMessage()
    assert event_and_fields(known)[1]["path"] == "/data"
    own = record("disk_full path=%s advice=%r", "/data", "buy one", level=logging.WARNING)
    Advice().filter(own)
    assert own.getMessage() == "disk_full path=/data advice='buy one'"
    for level, event in ((logging.INFO, "disk_full"), (logging.ERROR, "of_another_library 100%")):
        other = record(event, level=level)
        Advice().filter(other)
        assert other.getMessage() == event


def test_dropped_lines_are_counted_in_a_field() -> None:
    limit = RateLimit(lambda: 0.0)
    while limit.filter(record("refused")):
        pass
    serious = record("full path=%s at=%d", "100%", 7, level=logging.ERROR)
    assert limit.filter(serious)
    assert event_and_fields(serious)[1] == {
        "path": "100%",
        "at": 7,
        "lines_dropped_before_this": 1,
    }


@pytest.fixture
def journal(tmp_path: pathlib.Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "journal"))
        yield listening


def decoded(datagram: bytes) -> list[tuple[str, str]]:
    """The fields of a datagram, as the journal reads it."""
    found = []
    while datagram:
        line, _, datagram = datagram.partition(b"\n")
        name, sign, value = line.partition(b"=")
        if not sign:
            length = int.from_bytes(datagram[:8], "little")
            value, datagram = datagram[8 : 8 + length], datagram[9 + length :]
        found.append((name.decode(), value.decode()))
    return found


def test_the_journal_gets_the_fields_of_a_line(
    journal: socket.socket, tmp_path: pathlib.Path
) -> None:
    stream = io.StringIO()
    line = line_formatter("tr-flusher-0", "text", with_time=False)
    handler = JournalHandler("tr-flusher-0", stream, line, str(tmp_path / "journal"))
    said = record(
        "disk_error topic=%s process=%s error=%r", "orders", "w", "a\nb", level=logging.ERROR
    )
    handler.handle(said)
    assert decoded(journal.recv(65536)) == [
        ("MESSAGE", "process=tr-flusher-0 disk_error topic=orders process=w error='a\\nb'"),
        ("PRIORITY", "3"),
        ("SYSLOG_IDENTIFIER", "tailrace"),
        ("TAILRACE_PROCESS", "tr-flusher-0"),
        ("TAILRACE_EVENT", "disk_error"),
        ("TAILRACE_TOPIC", "orders"),
        ("TAILRACE_PROCESS", "w"),
        ("TAILRACE_ERROR", "a\nb"),
    ]
    assert stream.getvalue() == ""
    journal.close()
    os.unlink(tmp_path / "journal")
    handler.handle(said)
    assert stream.getvalue().startswith("<3>process=tr-flusher-0 disk_error topic=orders")
    handler.close()


def test_a_line_waits_for_no_journal(journal: socket.socket, tmp_path: pathlib.Path) -> None:
    stream = io.StringIO()
    line = line_formatter("p", "text", with_time=False)
    handler = JournalHandler("p", stream, line, str(tmp_path / "journal"))
    for _ in range(100_000):
        handler.handle(record("said"))
        if stream.getvalue():
            break
    assert stream.getvalue() == "<6>process=p said\n"
    handler.close()


def test_a_name_may_come_again_and_surrogates_are_escaped() -> None:
    assert decoded(encoded([("A", "1"), ("A", "x\ny"), ("B", "\udcff")])) == [
        ("A", "1"),
        ("A", "x\ny"),
        ("B", "\\udcff"),
    ]


def test_a_slow_operation_is_logged_with_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowOperations()
    assert slow.limit_ns > 1 << 62, "nothing is slow before the settings are known"
    slow.set_limit(20)
    assert slow.limit_ns == 20_000_000
    slow.log("sync", 31_900_000, data_dir="/d", bytes=7)
    assert caplog.messages == ["slow_operation operation=sync ms=31 data_dir=/d bytes=7"]
    slow.set_limit(0)
    assert slow.limit_ns > 1 << 62
