"""`tailrace consume`: where it begins and ends, what it prints, and what it refuses, as somebody
types it who knows kcat and rpk.
"""

from __future__ import annotations

import csv
import datetime as dt
import io
import os
import pty
import signal
import subprocess

import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import TAILRACE, run
from tests.kit.processes import HANG_LIMIT_S, wait_until

T0 = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


@pytest.fixture
def ten(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of two partitions with five records each, an hour apart, keys k0 to k9."""
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic, 2, {"retention.ms": -1})])
        for number in range(10):
            producer.send(
                topic,
                b"v%d" % number,
                b"k%d" % number,
                partition=number % 2,
                timestamp=T0 + dt.timedelta(hours=number),
            )
    return topic


def lines(appliance: EmbeddedAppliance, *arguments: str) -> list[bytes]:
    return sorted(run(appliance, "consume", *arguments).stdout.splitlines())


def test_it_begins_and_ends_where_it_is_told(appliance: EmbeddedAppliance, ten: str) -> None:
    assert lines(appliance, ten, "--tail", "1") == [b"v8", b"v9"]
    assert lines(appliance, ten, "--tail", "100") == lines(appliance, ten, "--from-beginning")
    assert lines(appliance, ten, "--since", "2024-01-01T07:00:00Z") == [b"v7", b"v8", b"v9"]
    assert lines(
        appliance, ten, "--since", "2024-01-01T02:00:00Z", "--until", "2024-01-01T04:00:00Z"
    ) == [b"v2", b"v3"]
    assert lines(appliance, ten, "--from-beginning", "--until", "2024-01-01T00:30:00Z") == [b"v0"]
    assert lines(appliance, ten, "--until", "2024-01-01T00:30:00Z") == [b"v0"]
    assert (
        b"exclude" in run(appliance, "consume", ten, "--follow", "--until", "1h", status=2).stderr
    )
    assert lines(appliance, ten, "--since", "1h") == []
    assert lines(appliance, ten, "--offset", "4") == [b"v8", b"v9"]


def test_templates_are_kcats(appliance: EmbeddedAppliance, ten: str) -> None:
    text = "%t|%p|%o|%k|%v|%s|%K|%S|%T|%h|%%\\n"
    printed = run(appliance, "consume", ten, "--partition", "1", "--tail", "1", "-f", text).stdout
    assert printed == b"%s|1|4|k9|v9|v9|2|2|%d||%%\n" % (
        ten.encode(),
        (T0 + dt.timedelta(hours=9)).timestamp() * 1000,
    )
    with Producer(appliance.address) as producer:
        producer.send(ten, None, partition=1).result(60)
        producer.send(ten, b"", b"", partition=1).result(60)
    assert (
        run(appliance, "consume", ten, "--partition", "1", "--tail", "2", "-f", "%K %S,").stdout
        == b"-1 -1,0 0,"
    ), "null is not empty"
    assert (
        run(appliance, "consume", ten, "--partition", "0", "--tail", "1", "-f", r"a\tb\\").stdout
        == b"a\tb\\"
    )
    assert b"'%x'" in run(appliance, "consume", ten, "--tail", "1", "-f", "%x", status=2).stderr
    assert (
        b"exclude"
        in run(
            appliance, "consume", ten, "--tail", "1", "-f", "%v", "--format", "json", status=2
        ).stderr
    )


def test_csv_has_names_and_quotes_what_needs_it(appliance: EmbeddedAppliance, ten: str) -> None:
    rows = list(
        csv.DictReader(
            io.StringIO(
                run(
                    appliance, "consume", ten, "--from-beginning", "--format", "csv"
                ).stdout.decode()
            )
        )
    )
    assert sorted((row["key"], row["value"]) for row in rows) == [
        (f"k{n}", f"v{n}") for n in range(10)
    ]
    assert {row["topic"] for row in rows} == {ten}


def test_csv_of_a_typed_topic_has_its_columns(appliance: EmbeddedAppliance, topic: str) -> None:
    frame = pa.table({"a": [1, 2], "b": ['x,"y"', None]})
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic, schema=frame)])
        producer.send_arrow(topic, frame)
    assert (
        run(appliance, "consume", topic, "--from-beginning", "--format", "csv").stdout
        == b'a,b\r\n1,"x,""y"""\r\n2,\r\n'
    )
    assert (
        b"different schemas"
        in run(
            appliance,
            "consume",
            topic,
            make(appliance, topic + "x"),
            "--tail",
            "1",
            "--format",
            "csv",
            status=2,
        ).stderr
    )


def make(appliance: EmbeddedAppliance, name: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name)])
    return name


def test_several_topics_and_patterns(appliance: EmbeddedAppliance, topic: str) -> None:
    names = [make(appliance, f"{topic}-{letter}") for letter in "ab"]
    with Producer(appliance.address) as producer:
        for name in names:
            producer.send(name, name)
    assert lines(appliance, *names, "--from-beginning") == [name.encode() for name in names]
    assert lines(appliance, f"{topic}-*", "--from-beginning") == [name.encode() for name in names]
    assert b"no topic matches" in run(appliance, "consume", f"{topic}-none*", status=1).stderr


def test_an_offset_behind_the_end_is_said(appliance: EmbeddedAppliance, ten: str) -> None:
    refused = run(appliance, "consume", ten, "--partition", "0", "--offset", "6", status=1).stderr
    assert f"{ten}-0 ends at offset 5 and has no offset 6".encode() in refused
    with Producer(appliance.address) as producer:
        producer.send(ten, b"v10", partition=0).result(60)
    partly = run(appliance, "consume", ten, "--offset", "6")
    assert partly.stdout == b""
    assert f"{ten}-1 ends at offset 5".encode() in partly.stderr


@pytest.mark.parametrize(
    "options", [("--tail", "1", "--offset", "3"), ("--since", "1h", "--from-beginning")]
)
def test_two_beginnings_are_one_too_many(
    appliance: EmbeddedAppliance, topic: str, options: tuple[str, ...]
) -> None:
    assert b"exclude each other" in run(appliance, "consume", topic, *options, status=2).stderr


def test_a_terminal_gets_no_binary_file(appliance: EmbeddedAppliance, ten: str) -> None:
    ours, theirs = pty.openpty()
    try:
        command = [
            TAILRACE,
            "consume",
            ten,
            "--from-beginning",
            "--format",
            "parquet",
            "--bootstrap",
            appliance.address,
        ]
        done = subprocess.run(
            command, stdout=theirs, stderr=subprocess.PIPE, timeout=HANG_LIMIT_S, check=False
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 2
    assert b"> records.parquet" in done.stderr


def committed(appliance: EmbeddedAppliance, group: str) -> dict[int, int]:
    with Admin(appliance.address) as admin:
        return {
            key.partition: int(found)
            for key, found in admin.list_group_offsets(group).items()
            if found is not None
        }


def test_a_group_goes_on_behind_what_was_printed(appliance: EmbeddedAppliance, ten: str) -> None:
    group = ("--group", ten, "--from-beginning")
    assert len(lines(appliance, ten, *group, "--max", "3")) == 3
    assert sum(committed(appliance, ten).values()) == 3, (
        "what was printed, and nothing else of what was fetched"
    )
    assert len(lines(appliance, ten, *group, "--format", "json")) == 7
    assert committed(appliance, ten) == {0: 5, 1: 5}
    assert lines(appliance, ten, *group) == []
    run(appliance, "group", "reset-offsets", ten, "--to-offset", "4")
    rows = list(
        csv.DictReader(
            io.StringIO(run(appliance, "consume", ten, *group, "--format", "csv").stdout.decode())
        )
    )
    assert sorted(row["value"] for row in rows) == ["v8", "v9"]
    run(appliance, "group", "reset-offsets", ten, "--to-earliest")
    arrow = pa.ipc.open_stream(
        run(appliance, "consume", ten, *group, "--format", "arrow", "--max", "4").stdout
    ).read_all()
    assert (arrow.num_rows, sum(committed(appliance, ten).values())) == (4, 4)
    for other in ("--partition", "--offset", "--tail"):
        assert b"leave out" in run(appliance, "consume", ten, *group, other, "1", status=2).stderr
    with Admin(appliance.address) as admin:
        assert admin.list_groups()[ten]["state"] == "EMPTY", "each left at its end"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_members_ctrl_c_or_sigterm_commits_what_it_has_printed(
    appliance: EmbeddedAppliance, ten: str, number: signal.Signals, status: int
) -> None:
    # Unbuffered, as in many containers: the signal comes while the last record is being written.
    environment = {**os.environ, "TAILRACE_BOOTSTRAP": appliance.address, "PYTHONUNBUFFERED": "1"}
    arguments = [TAILRACE, "consume", ten, "--group", ten, "--from-beginning", "--follow"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        printed = sorted(process.stdout.readline() for _ in range(10))
        process.send_signal(number)
        rest, complaint = process.communicate(timeout=HANG_LIMIT_S)
    assert (printed, rest) == ([b"v%d\n" % n for n in range(10)], b"")
    assert process.returncode == status, complaint
    assert committed(appliance, ten) == {0: 5, 1: 5}
    with Admin(appliance.address) as admin:
        assert admin.list_groups()[ten]["members"] == 0, "it has left"


def test_a_member_whose_reader_is_gone_leaves_and_commits_nothing_more(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """More than a pipe holds: the reader takes a line and ends, as `| head -1`."""
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic, 1))
        for _ in range(40):
            producer.send(topic, bytes(10_000).replace(b"\0", b"x"))
        producer.flush(HANG_LIMIT_S)
    environment = {**os.environ, "TAILRACE_BOOTSTRAP": appliance.address}
    arguments = [TAILRACE, "consume", topic, "--group", topic, "--from-beginning"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.readline()) == 10_001
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(HANG_LIMIT_S) == 141
    assert sum(committed(appliance, topic).values()) == 0
    with Admin(appliance.address) as admin:
        assert admin.list_groups()[topic]["members"] == 0, "it has left"


def test_a_member_that_shares_its_topic_commits_before_it_hands_over(
    appliance: EmbeddedAppliance, ten: str
) -> None:
    """One process reads everything and waits; a consumer that comes gets a partition, and begins
    behind what was printed.
    """
    environment = {**os.environ, "TAILRACE_BOOTSTRAP": appliance.address}
    arguments = [TAILRACE, "consume", ten, "--group", ten, "--from-beginning", "--follow"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert len([process.stdout.readline() for _ in range(10)]) == 10
            with Consumer(
                ten, bootstrap=appliance.address, group_id=ten, auto_offset_reset="earliest"
            ) as consumer:
                got: list[bytes] = []

                def has_one_partition() -> bool:
                    got.extend(record.value for record in consumer.poll(100))
                    return len(consumer.assignment()) == 1

                wait_until(has_one_partition, "the partitions are shared")
                (mine,) = consumer.assignment()
                with Producer(appliance.address) as producer:
                    for number in range(2):
                        producer.send(ten, b"new", partition=number).result(60)
                wait_until(
                    lambda: bool(has_one_partition() and got),
                    "the new record of this partition comes",
                )
                assert got == [b"new"]
                assert consumer.position(mine) == 6
                assert process.stdout.readline() == b"new\n"
        finally:
            process.kill()
