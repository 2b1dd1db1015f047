"""`tailrace export`: what it prints, for people and for programs, and how it ends."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pyarrow.dataset as ds
import pytest

from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import run
from tests.kit.processes import HANG_LIMIT_S


@pytest.fixture(scope="module")
def filled(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic("orders", 2), NewTopic("trimmed"), NewTopic("none")])
        for n in range(100):
            producer.send("orders", b"v%d" % n, b"k%d" % (n % 2), partition=n % 2, timestamp=n)
            producer.send("trimmed", b"v%d" % n)
        producer.flush(60)
    return appliance


def values(directory: Any) -> list[bytes]:
    return sorted(ds.dataset(directory, partitioning="hive").to_table().column("value").to_pylist())


def test_it_says_what_it_exported_and_that_it_went_on(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    lake = str(tmp_path / "lake")
    done = run(
        filled,
        "export",
        "orders",
        "--to",
        lake,
        "--partition-by",
        "key",
        "--rows",
        "60",
        is_process=True,
    )
    assert [line.split() for line in done.stdout.decode().splitlines()] == [
        ["PARTITION", "FROM", "TO", "LEFT", "OUT"], ["0", "0", "50", "0"], ["1", "0", "50", "0"],
    ]  # fmt: skip
    assert "exported 100 records in 4 files, " in done.stderr.decode()
    assert values(lake) == sorted(b"v%d" % n for n in range(100))
    again = run(filled, "export", "orders", "--to", lake, "--partition-by", "key")
    assert (
        again.stdout,
        b"exported 0 records" in again.stderr,
        b"went on with an earlier export" in again.stderr,
    ) == (b"", True, True)


def test_json_is_one_document(filled: EmbeddedAppliance, tmp_path: pathlib.Path) -> None:
    done = run(
        filled,
        "export",
        "orders",
        "--to",
        str(tmp_path),
        "--format",
        "arrow",
        "--columns",
        "offset, value",
        "--size",
        "1MiB",
        "--json",
    )
    said = json.loads(done.stdout)
    assert said.pop("bytes") == sum(path.stat().st_size for path in tmp_path.glob("*.arrow"))
    assert said == {
        "topic": "orders", "to": str(tmp_path), "format": "arrow", "resumed": False, "records": 100,
        "files": 1, "commits": 1,
        "partitions": [{"partition": p, "from": 0, "to": 50, "left_out": 0} for p in (0, 1)],
    }  # fmt: skip
    assert ds.dataset(tmp_path, format="arrow").to_table().schema.names == ["offset", "value"]
    nothing = json.loads(
        run(filled, "export", "none", "--to", str(tmp_path / "none"), "--json").stdout
    )
    assert (nothing["records"], nothing["partitions"]) == (0, [])


def test_what_is_lost_ends_it_or_is_counted_with_a_status_of_its_own(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    run(filled, "export", "trimmed", "--to", str(tmp_path))
    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        for n in range(100, 120):
            producer.send("trimmed", b"v%d" % n)
        producer.flush(60)
        admin.delete_records({TopicPartition("trimmed", 0): 110})
    refused = run(filled, "export", "trimmed", "--to", str(tmp_path), status=1).stderr.decode()
    assert "offsets 100 to 109 of trimmed-0 were removed by retention" in refused
    assert "--on-data-loss skip" in refused
    done = run(
        filled,
        "export",
        "trimmed",
        "--to",
        str(tmp_path),
        "--on-data-loss",
        "skip",
        "--json",
        status=4,
    )
    assert json.loads(done.stdout)["partitions"] == [
        {"partition": 0, "from": 110, "to": 120, "left_out": 10}
    ]
    assert "left out: offsets 100 to 109 of trimmed-0, removed by retention" in done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [(["orders"], 2, "Missing option '--to'"),
    (["oders", "--to", "{}"], 1, "did you mean 'orders'"),
     (["orders", "--to", "{}", "--format", "parket"], 2, "'parket' is not one of"),
     (["orders", "--to", "{}", "--size", "much"], 2, "write 64MiB"),
     (["orders", "--to", "{}", "--partition-by", "kee"], 1, "did you mean 'key'"),
     (["orders", "--to", "{}", "--since", "noon"], 2, "is not a time"),
     (["orders", "--to", "{}", "--max-delay", "soon"], 2, "is not a duration"),
     (["orders", "--to", "/proc/lake"], 1, "/proc/lake")],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_sentence(
    filled: EmbeddedAppliance,
    tmp_path: pathlib.Path,
    arguments: list[str],
    status: int,
    sentence: str,
) -> None:
    said = run(
        filled, "export", *(text.format(tmp_path / "lake") for text in arguments), status=status
    ).stderr.decode()
    assert sentence in said
    assert "Traceback" not in said
    assert not (tmp_path / "lake").exists()


def test_without_an_appliance_the_status_is_3_and_nothing_is_made(tmp_path: pathlib.Path) -> None:
    run(None, "export", "orders", "--to", str(tmp_path / "lake"), status=3)
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_followed_topic_is_told_of_by_the_line_until_a_signal_ends_it_between_two_commits(
    filled: EmbeddedAppliance,
    tmp_path: pathlib.Path,
    topic: str,
    number: signal.Signals,
    status: int,
) -> None:
    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        admin.create_topics([NewTopic(topic)])
        command = [sys.executable, "-P", "-c", "from appliance.cli.main import main; main()",
        "export", topic, "--to", str(tmp_path), "--follow",
                   "--max-delay", "50ms", "--json", "--bootstrap", filled.address]  # fmt: skip
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        ) as running:
            assert running.stdout is not None
            for n in range(2):
                producer.send(topic, b"v%d" % n).result(60)
                line = json.loads(running.stdout.readline())
                assert (line["commit"], line["records"], line["ranges"]) == (
                    n + 1,
                    1,
                    [[0, n, n + 1]],
                )
            running.send_signal(number)
            assert running.wait(HANG_LIMIT_S) == status
    assert values(tmp_path) == [b"v0", b"v1"]
