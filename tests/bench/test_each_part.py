"""Each bench runs to its end at its smallest size: what moves elsewhere takes its benches along.

Their figures say nothing at these sizes, and are not looked at.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.kit.processes import HANG_LIMIT_S

ROOT = pathlib.Path(__file__).parents[2]
PARTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "latency of an ack": (["bench.suite"], {"ONLY": "ack of one record, acks=1"}),
    "awaited send": (["bench.awaited_send"], {"ROUNDS": "1", "RECORDS": "2000"}),
    "start": (["bench.suite"], {"ONLY": "start to first"}),
    "producing": (["bench.suite"], {"ONLY": "produce 100 B, send, acks=1"}),
    "reading": (["bench.suite"], {"ONLY": "consume 100,000 B as Arrow"}),
    "end to end": (["bench.suite"], {"ONLY": "end to end, 1,000 B at 1,000/s"}),
    "recovery": (["bench.at_rest.recovery", "0.01", "1"], {}),
    "commits": (
        ["bench.members.groups", "commits"],
        {"SECONDS": "0.5", "MEMBERS": "4", "HEARTBEATS": "50", "BEATING_S": "1"},
    ),
    "lag": (["bench.members.groups", "lag"], {"LAG_PARTITIONS": "20"}),
    "queue": (["bench.members.groups", "queue"], {"QUEUED": "4000"}),
    "rebalance": (
        ["bench.members.rebalance", "--members", "12", "--partitions", "24", "--only", "tailrace"],
        {},
    ),
    "breadth": (
        ["bench.stages.breadth", "width", "producers"],
        {"SECONDS": "0.2", "ROUNDS": "1", "PRODUCERS": "3", "RECORDS_EACH": "100"},
    ),
    "budget": (["bench.stages.budget", "--rounds", "1", "--scale", "0.01"], {}),
    "scan": (["bench.reads.scan"], {"BYTES": "4000000", "REPETITIONS": "1"}),
    "latest": (["bench.reads.scan_latest"], {"RECORDS": "40000", "REPETITIONS": "1"}),
    "durability": (["bench.stages.durability", "1", "2000"], {}),
    "wakeups": (["bench.stages.wakeups", "--count", "20", "1", "tcp", "0"], {}),
    "security": (
        ["bench.security"],
        {
            "ROUNDS": "1",
            "MB": "1",
            "ACKS": "12",
            "LOGINS": "1",
            "USERS": "100",
            "RULES": "100",
            "STRANGERS": "50",
            "SECONDS": "0.5",
        },
    ),
    "clients of Kafka": (
        ["bench.peers.kafka_gateway"],
        {
            "ROUNDS": "1",
            "RECORDS": "5000",
            "ACKS": "20",
            "CONNECTIONS": "5",
            "MEMBERS": "3",
            "MB": "1",
        },
    ),
    "idle": (["bench.at_rest.idle", "--seconds", "0.2", "--clients", "0"], {}),
    "wide groups": (["bench.members.wide_groups", "5", "100", "1"], {}),
    "imports": (["bench.at_rest.imports", "1"], {}),
    "sink": (["bench.with_spark.spark_sink", "--parts"], {"ROWS": "20000", "REPETITIONS": "1"}),
}


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_a_bench_runs_to_its_end_at_its_smallest_size(part: str, tmp_path: pathlib.Path) -> None:
    (module, *arguments), switches = PARTS[part]
    (tmp_path / "results").mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        cwd=ROOT,
        env={
            **os.environ, "TOUCH": "0", "REPETITIONS": "1", "RESULTS": str(tmp_path / "results"),
            **switches,
        },
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANG_LIMIT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip()
