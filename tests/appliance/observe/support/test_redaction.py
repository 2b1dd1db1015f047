"""Redaction of a log before it is given away: what is left out, what is kept."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from appliance.observe.support.redaction import (
    SECRET,
    TEXT,
    UNKNOWN_LINE,
    log_lines,
    without_secrets,
)
from shm.runtime.logs.format import JsonFormatter, OneLineFormatter

PLANTED = "hunter2"


def as_text(template: str, *arguments: Any) -> str:
    record = logging.LogRecord("x", logging.INFO, "", 1, template, arguments or None, None)
    return OneLineFormatter("2026-01-01 INFO process=tr-front-0 %(message)s").format(record)


def as_json(template: str, *arguments: Any) -> str:
    record = logging.LogRecord("x", logging.INFO, "", 1, template, arguments or None, None)
    return JsonFormatter("tr-front-0").format(record)


@pytest.mark.parametrize("form", [as_text, as_json])
@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        ("request_refused client=%s reason=%r", ("c", f"the key '{PLANTED}' is too large")),
        ("request_refused client=%s reason=%r", ("c", f'it\'s "{PLANTED}"')),
        ("request_refused client=%s reason=%r", ("c", f"b'{PLANTED}' is no number")),
        ("internal_error id=%s %s reason=%r", ("f.1", "api=6", f"KeyError: b'{PLANTED}'")),
        ("internal_error id=%s %s reason=%r", ("f.1", "api=6", f"ValueError: {PLANTED}")),
        ("batch_refused topic=%s key=%s", ("t", PLANTED)),
        ("batch_refused topic=%s headers=%r", ("t", [("h", PLANTED)])),
        ("seen url=%s", (f"https://user:{PLANTED}@host/path",)),
        ("seen url=%s", (f"https://host/path?sig={PLANTED}",)),
        ("seen reason=%r", (f"Authorization: Bearer {PLANTED}",)),
        ("seen reason=%r", (f"password={PLANTED}",)),
        ("seen console.token=%s", (PLANTED,)),
        ("topic_change_refused topic=%r", (f"{{{PLANTED}}}",)),
    ],
)
def test_nothing_of_a_client_is_kept(form: Any, template: str, arguments: tuple[Any, ...]) -> None:
    line = form(template, *arguments)
    assert PLANTED in line
    (kept,) = log_lines([line])
    assert PLANTED not in kept
    assert template.partition(" ")[0] in kept


def test_a_client_id_of_several_words_is_no_field() -> None:
    (kept,) = log_lines([as_text("session_idle client=%s action=DROP", f"my {PLANTED} app")])
    assert kept.endswith(f"session_idle client=my {TEXT} {TEXT} action=DROP")


@pytest.mark.parametrize("form", [as_text, as_json])
def test_events_names_numbers_and_advice_are_kept(form: Any) -> None:
    (kept,) = log_lines(
        [
            form(
                "disk_error topic=%s partition=%d error=%r path=%s/%s advice='look at it'",
                "orders", 3, "Input/output error", "/var/lib/tailrace", "orders-3",
            )
        ]
    )  # fmt: skip
    for text in ("disk_error", "orders", "3", "Input/output error", "/var/lib/tailrace/orders-3"):
        assert text in kept
    assert "look at it" in kept
    assert "process" in kept


def test_tracebacks_keep_their_places_and_not_their_texts() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/opt/tailrace/x.py", line 3, in step',
        f"    raise KeyError({PLANTED!r})",
        f"KeyError: '{PLANTED}'",
        f"of another program: {PLANTED}",
        f"tailrace: the directory '{PLANTED}' is not empty",
        "2026-01-01T00:00:00+0000 host systemd[1]: Started tailrace.service.",
        '{"not": "ours"}',
        "",
    ]
    kept = list(log_lines(lines))
    assert PLANTED not in "".join(kept)
    assert kept == [
        lines[0], lines[1], UNKNOWN_LINE, f"KeyError: {TEXT}", UNKNOWN_LINE,
        f"tailrace: the directory {TEXT} is not empty", lines[6], UNKNOWN_LINE,
    ]  # fmt: skip


def test_secrets_by_name_go_from_any_text() -> None:
    text = json.dumps({"db_password": PLANTED, "token": PLANTED, "slots": 4})
    kept = without_secrets(text)
    assert PLANTED not in kept
    assert '"slots": 4' in kept
    assert kept.count(SECRET) == 2
