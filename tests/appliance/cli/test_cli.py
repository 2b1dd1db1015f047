"""The command line, as a user runs it: standard input and output, exit status, --json,
sentences.
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from appliance.cli.commands.monitoring.status import command as status_command
from appliance.cli.main import tailrace as root
from tailrace import Admin
from tailrace.core.schedule.delays import delay_id
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import run


def test_lines_go_in_and_come_out(appliance: EmbeddedAppliance, topic: str) -> None:
    run(
        appliance,
        "topic",
        "create",
        topic,
        "--partitions",
        "2",
        "--config",
        "compression.type=zstd",
        is_process=True,
    )
    run(
        appliance,
        "produce",
        topic,
        "--key-separator",
        ":",
        stdin=b"u1:hello\nu2:w:orld\n",
        is_process=True,
    )
    assert sorted(
        run(appliance, "consume", topic, "--from-beginning", is_process=True).stdout.split(b"\n")
    ) == [b"", b"hello", b"w:orld"]
    rows = [
        json.loads(line)
        for line in run(
            appliance, "consume", topic, "--from-beginning", "--format", "json"
        ).stdout.splitlines()
    ]
    assert {(row["key"], row["value"]) for row in rows} == {("u1", "hello"), ("u2", "w:orld")}
    assert (
        len(run(appliance, "consume", topic, "--from-beginning", "--max", "1").stdout.splitlines())
        == 1
    )


def test_bytes_that_are_no_text_survive(appliance: EmbeddedAppliance, topic: str) -> None:
    run(appliance, "topic", "create", topic)
    run(appliance, "produce", topic, stdin=b"\xff\xfe\x00\n")
    assert run(appliance, "consume", topic, "--from-beginning").stdout == b"\xff\xfe\x00\n"
    for form in (["--format", "json"], ["--json"], ["--json", "--format", "json"]):
        row = json.loads(run(appliance, "consume", topic, "--offset", "0", *form).stdout)
        assert row["value"] == {"base64": "//4A"}
    wrong = run(appliance, "consume", topic, "--json", "--format", "csv", status=2)
    assert b"--json and --format csv exclude each other" in wrong.stderr


FILES: dict[str, Callable[[pathlib.Path], Any]] = {
    "csv": lambda path: path.write_text("a,b,none\n1,x,\n2,y,\n"),
    "jsonl": lambda path: path.write_text('{"a": 1, "b": "x"}\n{"a": 2, "b": "y"}\n'),
    "parquet": lambda path: pq.write_table(pa.table({"a": [1, 2], "b": ["x", "y"]}), path),
    "arrow": lambda path: _write_arrow(path),
}


def _write_arrow(path: pathlib.Path) -> None:
    table = pa.table({"a": [1, 2], "b": ["x", "y"]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("kind", list(FILES))
def test_a_file_becomes_a_typed_topic_and_comes_out_in_every_format(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path, kind: str
) -> None:
    path = tmp_path / f"rows.{kind}"
    FILES[kind](path)
    done = run(
        appliance,
        "produce",
        topic,
        "--from",
        str(path),
        "--key-column",
        "b",
        "--partitions",
        "2",
        "--json",
    )
    assert json.loads(done.stdout)["records"] == 2
    described = json.loads(run(appliance, "topic", "describe", topic, "--json").stdout)
    assert described["typed"]
    assert len(described["partitions"]) == 2
    rows = sorted(
        (
            json.loads(line)
            for line in run(appliance, "consume", topic, "--from-beginning").stdout.splitlines()
        ),
        key=lambda row: row["a"],
    )
    assert [(row["a"], row["b"]) for row in rows] == [(1, "x"), (2, "y")]
    parquet = pq.read_table(
        pa.BufferReader(
            run(appliance, "consume", topic, "--from-beginning", "--format", "parquet").stdout
        )
    )
    arrow = pa.ipc.open_stream(
        run(appliance, "consume", topic, "--from-beginning", "--format", "arrow").stdout
    ).read_all()
    assert (
        sorted(parquet.column("a").to_pylist()) == sorted(arrow.column("a").to_pylist()) == [1, 2]
    )


def test_a_schema_file_makes_a_typed_topic(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "schema.csv"
    path.write_text("a,b\n1,x\n")
    run(appliance, "topic", "create", topic, "--schema", str(path))
    run(appliance, "produce", topic, stdin=b'{"a": 5, "b": "z"}\n')
    assert json.loads(run(appliance, "consume", topic, "--from-beginning").stdout) == {
        "a": 5,
        "b": "z",
    }
    assert (
        b"is not a JSON object"
        in run(appliance, "produce", topic, stdin=b"text\n", status=1).stderr
    )


def test_topics_are_listed_described_altered_and_deleted(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    run(appliance, "topic", "create", topic)
    assert topic in [
        row["name"] for row in json.loads(run(appliance, "topic", "list", "--json").stdout)
    ]
    assert topic.encode() in run(appliance, "topic", "list").stdout
    altered = json.loads(
        run(
            appliance,
            "topic",
            "alter",
            topic,
            "--partitions",
            "3",
            "--config",
            "segment.ms=5000",
            "--json",
        ).stdout
    )
    assert (altered["altered"], altered["partitions"], altered["configs"]["segment.ms"]) == (
        topic,
        3,
        5000,
    )
    assert json.loads(run(appliance, "topic", "online", topic, "--json").stdout) == {
        "online": topic
    }
    described = json.loads(run(appliance, "topic", "describe", topic, "--json").stdout)
    assert (len(described["partitions"]), described["configs"]["segment.ms"]) == (3, 5000)
    text = run(appliance, "topic", "describe", topic).stdout.decode()
    assert "timestamp[us, tz=UTC]" in text
    assert "ONLINE" in text
    assert json.loads(run(appliance, "topic", "delete", topic, "--yes", "--json").stdout) == {
        "deleted": topic
    }
    assert json.loads(run(appliance, "topic", "delete", topic, "--if-exists", "--json").stdout) == {
        "deleted": None
    }
    run(appliance, "topic", "describe", topic, status=1)


def test_status(appliance: EmbeddedAppliance) -> None:
    state = json.loads(run(appliance, "status", "--json").stdout)
    assert {p["name"] for p in state["processes"]} == {
        "supervisor",
        "controller",
        "front-0",
        "worker-0",
        "flusher-0",
    }
    assert all(p["live"] for p in state["processes"])
    assert b"flusher-0" in run(appliance, "status").stdout


def test_the_status_of_an_appliance_before_its_upgrade_is_shown(
    appliance: EmbeddedAppliance, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = Admin.describe_cluster

    def of_an_older_version(admin: Admin) -> dict[str, Any]:
        return {name: value for name, value in described(admin).items() if name != "bin"}

    monkeypatch.setattr(Admin, "describe_cluster", of_an_older_version)
    done = CliRunner().invoke(status_command, ["--bootstrap", appliance.address])
    assert (done.exit_code, done.exception) == (0, None)
    assert "flusher-0" in done.output


def test_exit_status_and_sentences(appliance: EmbeddedAppliance, topic: str) -> None:
    assert b"UNKNOWN_TOPIC" in run(appliance, "produce", topic, status=1, is_process=True).stderr
    assert b"no appliance answers" in run(None, "status", status=3, is_process=True).stderr
    said = run(appliance, "consme", status=2, is_process=True).stderr.decode()
    assert re.search(r"Did you mean .*'consume'", said), said
    assert (
        b"exclude each other"
        in run(appliance, "consume", topic, "--from-beginning", "--offset", "1", status=2).stderr
    )
    assert b"nothing to change" in run(appliance, "topic", "alter", topic, status=2).stderr
    assert (
        b"group reset-offsets"
        in run(appliance, "consume", topic, "--group", "g", "--offset", "1", status=2).stderr
    )
    done = run(appliance, "topic", "create", "a/b", status=1)
    assert done.stderr.startswith(b"tailrace: topic name 'a/b'")
    assert b"\x1b" not in done.stderr, "colour in a pipe"


EXAMPLE = re.compile(r"\s*(sudo |[A-Z_]+=\S+ |eval \"\$\()?(\S*/)?(tailrace|echo|pip) ")


def every_command() -> Iterator[tuple[str, click.Command]]:
    """Path and command of each command and group."""
    waiting: list[tuple[str, click.Command]] = [("tailrace", root)]
    while waiting:
        path, command = waiting.pop()
        yield path, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None, name
                waiting.append((f"{path} {name}", found))


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words behind `tailrace` name, and its arguments."""
    command: click.Command = root
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        if found is None:  # a group with a command of its own
            break
        command, words = found, words[1:]
    return command, words


def test_every_command_has_examples_that_can_be_copied() -> None:
    for case, command in every_command():
        text = (command.help or "").partition("Example:\n")[2].partition("\n\n")[0]
        lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
        assert lines, case
        for line in lines:
            assert EXAMPLE.match(line), (case, line)
            words = shlex.split(line.removesuffix("&"))
            for end in ("|", ">", "<"):
                if "tailrace" in words and end in words[words.index("tailrace") :]:
                    words = words[: words.index(end, words.index("tailrace"))]
            if "tailrace" not in words:
                continue
            used, arguments = command_of(words[words.index("tailrace") + 1 :])
            if not isinstance(used, click.Group):  # one that has a default command
                used.make_parser(click.Context(used)).parse_args(arguments)  # raises NoSuchOption


def test_log_dump_shows_batches_and_records_and_finds_damage(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    run(appliance, "topic", "create", topic)
    run(appliance, "produce", topic, stdin=b"one\ntwo\n")
    source = pathlib.Path(appliance.data_dir) / f"{topic}-0"
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    segment = copy / ("0" * 20 + ".arrows")
    row = json.loads(run(None, "log", "dump", "--json", str(segment)).stdout)
    assert (row["offsets"], row["records"]) == ("0-1", 2)
    assert b"intact, not sealed, next offset 2" in run(None, "log", "dump", str(segment)).stderr
    records = [
        json.loads(line)
        for line in run(None, "log", "dump", "--records", str(segment)).stdout.splitlines()
    ]
    assert [r["value"] for r in records] == ["one", "two"]
    data = bytearray(segment.read_bytes())
    data[-10] ^= 1
    segment.write_bytes(data)
    done = run(None, "log", "dump", str(segment), status=1)
    assert b"body checksum does not match" in done.stderr
    (copy / "partition.json").unlink()
    assert b"Copy both files together" in run(None, "log", "dump", str(segment), status=1).stderr


def test_delayed_lines_and_rows_are_listed_cancelled_and_rescheduled(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    run(appliance, "topic", "create", topic, "--config", "delay.enabled=true")
    for key in ("u1", "u2", "u3"):
        run(
            appliance,
            "produce",
            topic,
            "--key-separator",
            ":",
            "--due",
            "2h",
            stdin=f"{key}:call\n".encode(),
        )
    rows = json.loads(run(appliance, "delay", "list", topic, "--json").stdout)
    assert [row["key"] for row in rows] == ["u1", "u2", "u3"]
    assert json.loads(run(appliance, "delay", "list", topic, "--to", "1h", "--json").stdout) == []
    assert (
        len(json.loads(run(appliance, "delay", "list", topic, "--max", "2", "--json").stdout)) == 2
    )
    done = run(appliance, "delay", "reschedule", topic, "2020-01-01T00:00:00Z", rows[0]["delay_id"])
    assert (len(done.stdout.split()), b"rescheduled 1 of 1" in done.stderr) == (1, True)
    assert run(
        appliance, "consume", topic, "--offset", "0", "--follow", "--max", "1", "--format", "json"
    ).stdout.startswith(b"{")
    assert (
        json.loads(run(appliance, "delay", "cancel", topic, "--key", "u2", "--json").stdout)[
            "cancelled"
        ]
        == 1
    )
    assert [
        row["key"] for row in json.loads(run(appliance, "delay", "list", topic, "--json").stdout)
    ] == ["u3"]
    late = run(appliance, "delay", "cancel", topic, rows[1]["delay_id"], status=1)
    assert b"too late" in late.stderr or b"pending" in late.stderr, late.stderr
    source = tmp_path / "rows.csv"
    source.write_text("name,due\na,2020-01-01T00:00:00Z\nb,2040-01-01T00:00:00Z\n")
    run(appliance, "produce", f"{topic}-typed", "--from", str(source), "--due-column", "due")
    (row,) = json.loads(
        run(appliance, "delay", "list", f"{topic}-typed", "--from", "1d", "--json").stdout
    )
    assert row["due"] == "2040-01-01T00:00:00+00:00"
    for wrong, sentence in (
        (["--due", "tomorrow"], b"is not a time"),
        (["--due", "2040-01-01"], b"has no offset from UTC"),
        (["--due-column", "x"], b"--from"),
    ):
        assert sentence in run(appliance, "produce", topic, *wrong, status=2).stderr


def test_a_delay_id_that_begins_with_a_dash_is_no_option(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    run(appliance, "topic", "create", topic, "--config", "delay.enabled=true")
    dashed = [delay_id(b"\xfb" + os.urandom(15), 0, offset, 0) for offset in range(2)]
    assert all(name.startswith("-") for name in dashed)
    for words in (
        ["cancel", topic, *dashed, "--json"],
        ["reschedule", topic, "--json", "15m", *dashed],
        ["cancel", "--json", "--", topic, *dashed],
    ):
        refused = json.loads(run(appliance, "delay", *words, status=1).stdout)["refused"]
        assert list(refused) == dashed
    assert b"No such option" in run(appliance, "delay", "cancel", topic, "--jsn", status=2).stderr


def test_a_bad_line_ends_the_sending_and_what_was_acknowledged_is_said(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    run(appliance, "topic", "create", topic)
    done = run(
        appliance, "produce", topic, "--key-separator", ":", stdin=b"a:1\nb:2\nbad\nc:3\n", status=1
    )
    assert b"line 3 has no ':'" in done.stderr
    assert b"of the 2 lines before it 2 are acknowledged" in done.stderr
    assert len(run(appliance, "consume", topic, "--from-beginning").stdout.splitlines()) == 2


def test_bad_lines_are_left_out_up_to_a_number_and_kept_in_a_file(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "schema.csv").write_text("a,b\n1,x\n")
    run(appliance, "topic", "create", topic, "--schema", str(tmp_path / "schema.csv"))
    rejected = tmp_path / "rejected.jsonl"
    lines = b'{"a": 1, "b": "x"}\ntext\n{"a": 2, "b": "y"}\n{"z": 5}\n{"a": "word", "b": "y"}\n'
    done = run(
        appliance,
        "produce",
        topic,
        "--skip-bad",
        "3",
        "--bad-to",
        str(rejected),
        "--json",
        stdin=lines,
    )
    assert (json.loads(done.stdout)["records"], json.loads(done.stdout)["skipped"]) == (2, 3)
    assert rejected.read_bytes() == b'text\n{"z": 5}\n{"a": "word", "b": "y"}\n'
    assert (
        b"1 skipped"
        in run(appliance, "produce", topic, "--skip-bad", "1", stdin=lines, status=1).stderr
    )


def test_key_header_partition_and_timestamp_of_every_line(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    run(appliance, "topic", "create", topic, "--partitions", "3")
    flags = [
        "--key",
        "u1",
        "--header",
        "h=v",
        "--partition",
        "2",
        "--timestamp",
        "2027-01-31T08:00:00Z",
    ]
    run(appliance, "produce", topic, *flags, stdin=b"hello\n")
    row = json.loads(
        run(appliance, "consume", topic, "--from-beginning", "--format", "json").stdout
    )
    assert (row["partition"], row["key"], row["timestamp"]) == (2, "u1", 1801382400000)
    assert "h" in str(row["headers"])
    for wrong in (
        ["--key", "a", "--key-separator", ":"],
        ["--format", "csv"],
        ["--from", "-", "--key", "a"],
    ):
        run(appliance, "produce", topic, *wrong, status=2)


def test_rows_come_from_standard_input_and_from_compressed_files(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    run(appliance, "produce", topic, "--from", "-", "--format", "tsv", stdin=b"a\tb\n1\tx\n")
    packed = tmp_path / "rows.csv.gz"
    packed.write_bytes(gzip.compress(b"a,b\n2,y\n"))
    run(appliance, "produce", topic, "--from", str(packed))
    rows = [
        json.loads(line)
        for line in run(appliance, "consume", topic, "--from-beginning").stdout.splitlines()
    ]
    assert rows == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert (
        b"--format"
        in run(appliance, "produce", topic, "--from", "-", stdin=b"a\n1\n", status=2).stderr
    )


def test_a_topic_that_is_there_or_is_not_can_be_no_error(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    assert (
        json.loads(run(appliance, "topic", "create", topic, "--if-not-exists", "--json").stdout)[
            "created"
        ]
        == topic
    )
    assert (
        json.loads(run(appliance, "topic", "create", topic, "--if-not-exists", "--json").stdout)[
            "created"
        ]
        is None
    )
    run(appliance, "topic", "create", topic, status=1)
    run(appliance, "topic", "delete", topic, "--if-exists", "--yes")
    assert b"there is no topic" in run(appliance, "topic", "delete", topic, "--if-exists").stderr
    run(appliance, "topic", "delete", topic, status=1)


def test_a_command_alone_shows_what_there_is() -> None:
    for arguments in ([], ["topic"]):
        done = run(None, *arguments, is_process=True)
        assert b"Commands:" in done.stdout
        assert not done.stderr
