"""`tailrace produce`: records that recur, what is said when the sending ends early, files that
cannot be read.
"""

from __future__ import annotations

import bz2
import datetime as dt
import gzip
import json
import pathlib
import re
import signal
import subprocess

import pytest

from tailrace import Admin, Consumer, NewTopic, TopicPartition, embedded
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import TAILRACE, run
from tests.kit.processes import HANG_LIMIT_S, wait_until


@pytest.fixture
def delayed(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, 1, {"delay.enabled": True}))
    return topic


def test_lines_recur_until_their_id_is_cancelled(
    appliance: EmbeddedAppliance, delayed: str
) -> None:
    done = run(
        appliance,
        "produce",
        delayed,
        "--every",
        "50ms",
        "--key",
        "k",
        stdin=b"beat\n",
        is_process=True,
    )
    (delay_id,) = done.stdout.decode().split()
    assert b"delivered every 50ms" in done.stderr
    seen = run(
        appliance,
        "consume",
        delayed,
        "--from-beginning",
        "--follow",
        "--max",
        "3",
        "-f",
        "%k=%v\\n",
    ).stdout
    assert seen == b"k=beat\n" * 3
    run(appliance, "delay", "cancel", delayed, delay_id)
    assert json.loads(run(appliance, "delay", "list", delayed, "--json").stdout) == []


def test_cron_and_every_say_when_and_from_when(appliance: EmbeddedAppliance, delayed: str) -> None:
    flags = ["--cron", "30 8 * * *", "--zone", "Asia/Tokyo", "--missed", "last", "--json"]
    answer = json.loads(run(appliance, "produce", delayed, *flags, stdin=b"a\nb\n").stdout)
    assert answer["records"] == len(answer["delay_ids"]) == 2
    run(
        appliance,
        "produce",
        delayed,
        "--every",
        "1h30m",
        "--due",
        "2040-01-31T08:00:00Z",
        stdin=b"c\n",
    )
    rows = json.loads(run(appliance, "delay", "list", delayed, "--json").stdout)
    assert {row["delay_id"] for row in rows[:2]} == set(answer["delay_ids"])
    assert [row["repeat"] for row in rows] == ["30 8 * * * (Asia/Tokyo), missed: last"] * 2 + [
        "every 1h30m"
    ]
    moment = dt.datetime.fromisoformat(rows[0]["due"])
    assert (moment.hour, moment.minute) == (23, 30), "08:30 in Tokyo"
    assert rows[2]["due"] == "2040-01-31T08:00:00+00:00"


def test_delayed_and_recurring_lines_are_part_of_a_transaction(
    appliance: EmbeddedAppliance, delayed: str
) -> None:
    transaction = ["--transactional", f"{delayed}-lines"]
    every = run(appliance, "produce", delayed, *transaction, "--every", "1h", stdin=b"a\nb\n")
    assert len(every.stdout.split()) == 2
    run(appliance, "produce", delayed, *transaction, "--due", "1h", stdin=b"c\n")
    refused = run(appliance, "produce", delayed, *transaction, "--due", "1h",
                  stdin=b"d\n" + bytes(2_000_000) + b"\n", status=1)  # fmt: skip
    assert b"0 records are committed, those after them are aborted" in refused.stderr
    rows = json.loads(run(appliance, "delay", "list", delayed, "--json").stdout)
    assert sorted(row["repeat"] or "" for row in rows) == ["", "every 1h", "every 1h"]


def test_a_topic_without_delays_refuses_what_recurs_and_says_what_to_do(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    run(appliance, "topic", "create", topic)
    for flags in (["--every", "10s"], ["--cron", "0 8 * * *"], ["--due", "1h"]):
        refused = run(appliance, "produce", topic, *flags, stdin=b"a\nb\n", status=1).stderr
        assert b"takes no delayed records" in refused
        assert b"nothing was sent before it" in refused
        assert b"--config delay.enabled=true" in refused


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [(["--every", "10s", "--cron", "* * * * *"], b"exclude each other"),
    (["--zone", "UTC"], b"--cron"), (["--missed", "all"], b"--every or --cron"),
     (["--every", "1ms"], b"between 10 ms and 20 years"),
     (["--every", "soon"], b"is not a duration; write 500ms"),
     (["--cron", "8"], b"is no cron expression"),
     (["--cron", "0 8 * * *", "--zone", "Mars/Base"], b"no time zone 'Mars/Base'"),
     (["--from", "-", "--every", "1s"], b"--every is for lines")],
)  # fmt: skip
def test_recurrences_that_are_none_are_usage_errors(flags: list[str], sentence: bytes) -> None:
    assert sentence in run(None, "produce", "t", *flags, status=2).stderr


def test_ctrl_c_says_what_is_acknowledged(appliance: EmbeddedAppliance, topic: str) -> None:
    run(appliance, "topic", "create", topic)
    command = [TAILRACE, "produce", topic, "--bootstrap", appliance.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as produce:
        assert produce.stdin is not None
        assert produce.stderr is not None
        produce.stdin.write(b"a\nb\n")
        produce.stdin.flush()
        with Consumer(bootstrap=appliance.address) as consumer:
            key = TopicPartition(topic, 0)
            wait_until(lambda: consumer.end_offsets([key])[key] == 2, "both lines are there")
        produce.send_signal(signal.SIGINT)
        said = produce.stderr.read()
        assert produce.wait(HANG_LIMIT_S) == 130
    # Stored they are; whether the acknowledgements had come, too, depends on the machine.
    assert re.search(rb"interrupted; [012] of 2 sent lines are acknowledged", said), said


def test_a_file_that_cannot_be_read_is_said_with_its_reason(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    whole = b"a,b\n" + b"".join(b"%d,%d\n" % (n, n * n) for n in range(500))
    cases = {
        "cut.csv.gz": (
            gzip.compress(whole)[:-40],
            b"as gzip with csv in it: Truncated compressed stream",
        ),
        "no.csv.gz": (b"text", b"as gzip with csv in it"),
        "cut.csv.bz2": (bz2.compress(whole)[:-40], b"as bz2 with csv in it"),
        "no.arrow": (b"\x07" * 100, b"as arrow"),
        "no.parquet": (b"\x07" * 100, b"as parquet"),
        "empty.csv": (b"", b"as csv: Empty CSV file"),
    }
    for name, (content, sentence) in cases.items():
        (tmp_path / name).write_bytes(content)
        refused = run(appliance, "produce", topic, "--from", str(tmp_path / name), status=1).stderr
        assert sentence in refused, refused
        assert str(tmp_path / name).encode() in refused
        assert b"None" not in refused
    assert topic not in [
        row["name"] for row in json.loads(run(appliance, "topic", "list", "--json").stdout)
    ], "made for a file without rows"


def test_lines_create_a_missing_topic_where_the_appliance_allows_it(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    refused = run(appliance, "produce", topic, stdin=b"a\n", status=1).stderr
    assert f"there is no topic '{topic}'".encode() in refused
    with embedded() as allowing:
        run(allowing, "produce", topic, "--key", "k", stdin=b"a\nb\n")
        read = run(allowing, "consume", topic, "--from-beginning", "-f", "%k=%v\\n").stdout
        assert read == b"k=a\nk=b\n"
        run(allowing, "produce", "whole", "--transactional", "id", stdin=b"c\n")
        assert run(allowing, "consume", "whole", "--from-beginning").stdout == b"c\n"
        refused = run(allowing, "produce", "later", "--due", "1h", stdin=b"d\n", status=1).stderr
        assert b"there is no topic 'later'" in refused
