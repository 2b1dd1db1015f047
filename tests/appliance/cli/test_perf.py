"""`tailrace perf`: the lines of Kafka's tools, and latencies that a stall cannot hide."""

from __future__ import annotations

import json
import re

from appliance.cli.perf.advise import Advice
from appliance.cli.perf.latencies import Latencies, Schedule
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import run

SENT = re.compile(
    r"1000 records sent, [\d.]+ records/sec \([\d.]+ MB/sec\), [\d.]+ ms avg latency, [\d.]+ ms max latency, "  # noqa: E501
    r"[\d.]+ ms 50th, [\d.]+ ms 95th, [\d.]+ ms 99th, [\d.]+ ms 99.9th."
)
COLUMNS = (
    "start.time, end.time, data.consumed.in.MB, MB.sec, data.consumed.in.nMsg, nMsg.sec, "
    "rebalance.time.ms, fetch.time.ms, fetch.MB.sec, fetch.nMsg.sec"
)


def test_a_stall_counts_against_every_record_that_it_delayed() -> None:
    now_ns = 0
    slept: list[float] = []
    schedule = Schedule(1000, lambda: now_ns, slept.append)
    assert schedule.wait_for(0) == 0
    assert schedule.wait_for(1) == 1_000_000
    assert slept == [0.001]
    now_ns = 10_000_000  # the program stood still for ten records
    assert [schedule.wait_for(number) for number in (2, 3, 4)] == [2_000_000, 3_000_000, 4_000_000]
    assert len(slept) == 1


def test_percentiles_are_of_all_and_reports_of_what_is_new() -> None:
    latencies = Latencies()
    for value in range(1, 1001):
        latencies.add(float(value))
    assert latencies.since_last() == (500.5, 1000.0)
    latencies.add(5000.0)
    assert latencies.since_last() == (5000.0, 5000.0)
    assert latencies.since_last() == (0.0, 0.0)
    summary = latencies.summary()
    assert (summary.percentiles[50.0], summary.percentiles[99.0], summary.most, summary.count) == (
        501.0,
        991.0,
        5000.0,
        1001,
    )


def test_the_tools_print_what_kafkas_print(appliance: EmbeddedAppliance, topic: str) -> None:
    run(appliance, "topic", "create", topic, "--partitions", "2")
    sent = run(
        appliance, "perf", "produce", "--topic", topic, "--num-records", "1000", "--record-size",
        "100", "--throughput", "20000",
        "--producer-props", "acks=1 linger.ms=2", "--print-metrics",
    ).stdout.decode().splitlines()  # fmt: skip
    assert SENT.fullmatch(sent[0])
    assert "records_sent         : 1000" in sent
    columns, row = (
        run(appliance, "perf", "consume", "--topic", topic, "--messages", "1000")
        .stdout.decode()
        .splitlines()
    )
    assert columns == COLUMNS
    assert len(row.split(", ")) == len(columns.split(", "))
    assert row.split(", ")[4] == "1000"
    found = json.loads(
        run(
            appliance,
            "perf",
            "consume",
            "--topic",
            topic,
            "--messages",
            "1000",
            "--arrow",
            "--json",
        ).stdout
    )
    assert found["records"] == 1000
    lines = (
        run(appliance, "perf", "latency", "--topic", topic, "--num-records", "20")
        .stdout.decode()
        .splitlines()
    )
    assert lines[1].startswith("Avg latency: ")
    assert lines[2].startswith("Percentiles: 50th = ")
    found = json.loads(
        run(
            appliance,
            "perf",
            "latency",
            "--topic",
            topic,
            "--num-records",
            "200",
            "--throughput",
            "1000",
            "--json",
        ).stdout
    )
    assert found["records"] == 200


def test_what_cannot_be_measured_is_said(appliance: EmbeddedAppliance, topic: str) -> None:
    run(
        appliance,
        "perf",
        "produce",
        "--topic",
        topic,
        "--num-records",
        "1",
        "--record-size",
        "1",
        status=1,
    )
    run(appliance, "topic", "create", topic)
    assert (
        b"--record-size or --payload-file"
        in run(
            appliance, "perf", "produce", "--topic", topic, "--num-records", "1", status=2
        ).stderr
    )
    wrong = run(
        appliance,
        "perf",
        "produce",
        "--topic",
        topic,
        "--num-records",
        "1",
        "--record-size",
        "1",
        "--producer-props",
        "ack=1",
        status=1,
    )
    assert b"did you mean acks?" in wrong.stderr
    few = run(
        appliance, "perf", "consume", "--topic", topic, "--messages", "10", "--timeout", "200"
    )
    assert b"only 0 of 10 records came" in few.stderr


def test_advice_follows_the_rule_and_leaves_no_topic_behind(appliance: EmbeddedAppliance) -> None:
    assert (Advice(500e6, 100e6, 300e6).by_rule, Advice(500e6, 100e6, 300e6).for_both) == (2, 5)
    assert Advice(1.0, 100e6, 300e6).by_rule == 1
    before = run(appliance, "topic", "list").stdout
    found = json.loads(
        run(appliance, "perf", "advise", "--target", "500MB/s", "--seconds", "0.3", "--json").stdout
    )
    assert found["target_bytes_per_s"] == 500e6
    assert (
        found["partitions"]
        == Advice(500e6, found["produce_bytes_per_s"], found["consume_bytes_per_s"]).by_rule
    )
    assert (
        b"Tt / max(Tp, Tc): "
        in run(appliance, "perf", "advise", "--target", "1 kb/s", "--seconds", "0.1").stdout
    )
    assert run(appliance, "topic", "list").stdout == before
    for rate in ("fast", "50"):
        assert (
            b"is not a rate" in run(appliance, "perf", "advise", "--target", rate, status=2).stderr
        )
