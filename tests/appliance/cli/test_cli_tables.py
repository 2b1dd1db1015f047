"""Output for people: tables that cut nothing which is copied, sizes and times of a topic, questions
before something is deleted, misspelt variables.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess

import pytest

from appliance.cli.commands.topics.describe import OLDEST_MAX
from appliance.cli.output import print_table
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import TAILRACE, on_terminal, run
from tests.kit.processes import HANG_LIMIT_S

T0 = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


def make(appliance: EmbeddedAppliance, topic: str, **configs: str) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(
            NewTopic(topic, 2, {name.replace("_", "."): value for name, value in configs.items()})
        )


def test_ids_are_whole_on_a_narrow_terminal_and_in_a_pipe(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, delay_enabled="true")
    long_key = b"key-" + b"x" * 400 + b"-end\x1b[31m\n"
    with Producer(appliance.address) as producer:
        delay_id = (
            producer.send(topic, b"v", long_key, deliver_after=dt.timedelta(hours=2))
            .result(HANG_LIMIT_S)
            .delay_id
        )
    assert delay_id is not None
    status, shown = on_terminal(appliance, "delay", "list", topic, columns=60)
    assert status == 0
    assert delay_id in shown
    assert "key-xxxxxxx..x1b[31m\\x0a" in shown, "a key is not copied: its middle may go"
    piped = run(appliance, "delay", "list", topic).stdout.decode()
    assert delay_id in piped
    assert "x" * 400 + "-end\\x1b[31m\\x0a" in piped
    assert "\x1b" not in shown + piped, "a key moves the cursor"
    described = on_terminal(appliance, "topic", "describe", topic, columns=40)[1]
    topic_id = json.loads(run(appliance, "topic", "describe", topic, "--json").stdout)["topic_id"]
    assert f"id       {topic_id}" in described
    state = json.loads(run(appliance, "status", "--json").stdout)
    assert state["cluster_id"] in on_terminal(appliance, "status", columns=40)[1]
    assert "…" not in described
    assert all(line == line.rstrip() for line in piped.splitlines())


def test_numbers_are_to_the_right_also_beside_those_that_are_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(
        ["TOPIC", "COMMITTED", "LAG", "MEMBER"],
        [["t", 5, "-", None], ["t", "-", "-", None], ["t", None, 1234, None]],
    )
    assert capsys.readouterr().out == (
        "TOPIC  COMMITTED   LAG  MEMBER\n"
        "t              5     -\n"
        "t              -     -\n"
        "t                 1234\n"
    )  # fmt: skip


def test_sentences_wrap_on_a_terminal_and_stay_whole_in_a_pipe(
    appliance: EmbeddedAppliance,
) -> None:
    arguments = ("doctor", "--bootstrap", "tcp://127.0.0.1:1", "--data-dir", "/")
    sentence = "start one with `tailrace serve`, or name its directories with --data-dir"
    shown = on_terminal(appliance, *arguments, columns=60)[1]
    assert sentence in " ".join(shown.split())
    assert sentence not in shown
    assert max(len(line) for line in shown.splitlines() if "--data-dir" in line) <= 60
    assert (
        sentence.encode()
        in subprocess.run(
            [TAILRACE, *arguments], capture_output=True, timeout=HANG_LIMIT_S, check=False
        ).stdout
    )


def test_a_topic_is_described_with_sizes_and_times(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    before = dt.datetime.now(dt.UTC)
    make(appliance, topic, retention_ms="-1")
    empty = json.loads(run(appliance, "topic", "describe", topic, "--json").stdout)
    assert [
        (p["records"], p["oldest_timestamp"], p["newest_timestamp"]) for p in empty["partitions"]
    ] == [(0, None, None)] * 2
    with Producer(appliance.address) as producer:
        for number in range(5):
            producer.send(
                topic, b"v" * 100, partition=1, timestamp=T0 + dt.timedelta(days=number)
            ).result(HANG_LIMIT_S)
    found = json.loads(run(appliance, "topic", "describe", topic, "--json").stdout)
    assert (
        dt.timedelta(0)
        <= dt.datetime.fromisoformat(found["created"]) - before
        < dt.timedelta(minutes=2)
    )
    partition = found["partitions"][1]
    assert (
        partition["records"],
        partition["segments"],
        partition["beginning_offset"],
        partition["end_offset"],
    ) == (5, 1, 0, 5)
    assert partition["bytes"] > 500
    assert partition["oldest_timestamp"] == T0.timestamp() * 1000
    assert partition["newest_timestamp"] == (T0 + dt.timedelta(days=4)).timestamp() * 1000
    assert partition["last_append"] >= before.timestamp() * 1000 - 1
    text = run(appliance, "topic", "describe", topic).stdout.decode()
    assert "holds    5 records in 2 partitions, " in text
    assert "2024-01-01T00:00:00Z  2024-01-05T00:00:00Z  " in text
    run(appliance, "topic", "delete-records", topic, "--partition", "1", "--before", "2", "--yes")
    after = json.loads(run(appliance, "topic", "describe", topic, "--json").stdout)["partitions"][1]
    assert (after["records"], after["oldest_timestamp"]) == (
        3,
        (T0 + dt.timedelta(days=2)).timestamp() * 1000,
    )


def test_of_many_partitions_the_first_ones_are_looked_into(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic, OLDEST_MAX + 2))
        for partition in range(OLDEST_MAX + 2):
            producer.send(topic, b"v", partition=partition)
    found = json.loads(run(appliance, "topic", "describe", topic, "--json").stdout)["partitions"]
    assert [p["oldest_timestamp"] is None for p in found[OLDEST_MAX:]] == [True, True]
    assert all(p["newest_timestamp"] for p in found)


@pytest.mark.parametrize(
    "words",
    [["delete"], ["delete-records", "--partition", "1", "--before", "-1"]],
    ids=["delete", "delete-records"],
)
def test_a_terminal_is_asked_before_something_is_deleted(
    appliance: EmbeddedAppliance, topic: str, words: list[str]
) -> None:
    make(appliance, topic)
    with Producer(appliance.address) as producer:
        producer.send(topic, b"v", partition=1).result(HANG_LIMIT_S)
    command = ["topic", words[0], topic, *words[1:]]

    def records() -> int:
        with Admin(appliance.address) as admin:
            if topic not in admin.list_topics():
                return 0
            return sum(p["records"] for p in admin.describe_topics([topic])[topic]["partitions"])

    status, shown = on_terminal(appliance, *command, typed="n\n")
    assert (status, records()) == (130, 1)
    assert "1 record" in shown
    assert on_terminal(appliance, *command, typed="\n")[0] == 130, "what Enter alone answers"
    assert records() == 1
    status, shown = on_terminal(appliance, *command, "--yes")
    assert (status, records()) == (0, 0)
    assert "[y/N]" not in shown


@pytest.mark.parametrize(
    "words",
    [["delete"], ["delete-records", "--partition", "0", "--before", "-1"]],
    ids=["delete", "delete-records"],
)
def test_without_a_terminal_nothing_is_deleted_and_the_error_names_the_flag(
    appliance: EmbeddedAppliance, topic: str, words: list[str]
) -> None:
    make(appliance, topic)
    with Producer(appliance.address) as producer:
        producer.send(topic, b"v", partition=0).result(HANG_LIMIT_S)
    done = run(appliance, "topic", words[0], topic, *words[1:], status=2, is_process=True)
    assert b"1 record" in done.stderr
    assert b"confirm with --yes" in done.stderr
    with Admin(appliance.address) as admin:
        assert admin.describe_topics([topic])[topic]["partitions"][0]["records"] == 1


def test_a_topic_that_is_not_there_is_not_asked_about(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    status, shown = on_terminal(appliance, "topic", "delete", topic, "--if-exists")
    assert (status, "there is no topic" in shown, "[y/N]" in shown) == (0, True, False)


def test_a_misspelt_variable_is_said_and_others_are_not(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    environment = {
        **os.environ,
        "TAILRACE_BOOTSTRAP": appliance.address,
        "TAILRACE_RING_BYTES": "64MiB",
    }
    for misspelt, said in (
        ({}, b""),
        (
            {"TAILRACE_CONTXT": "x"},
            b"TAILRACE_CONTXT names no setting; did you mean TAILRACE_CONTEXT?",
        ),
    ):
        done = subprocess.run(
            [TAILRACE, "topic", "list"],
            env={**environment, **misspelt},
            capture_output=True,
            timeout=HANG_LIMIT_S,
            check=True,
        )
        assert said in done.stderr
        assert bool(said) == bool(done.stderr)
