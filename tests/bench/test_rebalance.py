"""`make bench-rebalance`, small: ours alone; and what it says where Kafka cannot be had."""

from __future__ import annotations

import io
import json
import math
import os
import pathlib
import subprocess
import sys
from contextlib import AbstractContextManager

import psutil
import pytest

from bench.members import rebalance
from bench.members.rebalance import TAILRACE, Shape, measure_all
from bench.members.rebalance_table import Column, as_rows, table
from bench.peers.kafka_groups import NAME as KAFKA
from bench.peers.servers import Missing, tied
from tests.kit.processes import HANG_LIMIT_S, wait_until

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow_because("200 members join")
def test_each_partition_of_a_dead_member_is_owned_and_read_again_and_no_other_one_moves() -> None:
    command = [
        sys.executable, "-P", "-m", "bench.members.rebalance", "--members", "4",
        "--partitions", "8",
        "--kills", "1", "--stops", "0", "--window", "2",
        "--only", "tailrace", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads(done.stdout)
    found = {row["name"]: row["value"] for row in result["figures"]}
    assert found["SIGKILL of a member: until its partitions are owned again"] is not None
    assert found["SIGKILL: until records of each of them are received again"] is not None
    assert found["SIGKILL: partitions that it had"] == 2
    assert found["SIGKILL: other partitions that changed hands"] == 0
    assert result["missing"] == []


def test_a_contender_that_cannot_be_had_is_left_out_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_directory: str, _partition_count: int) -> AbstractContextManager[rebalance.Group]:
        raise Missing("java is missing")

    monkeypatch.setitem(rebalance.CONTENDERS, KAFKA, missing)
    assert measure_all(Shape(4, 8, 1), [KAFKA], io.StringIO()) == (
        {},
        [f"{KAFKA} is left out: java is missing"],
    )


def test_the_table_has_median_and_spread_and_says_what_did_not_come_in_time() -> None:
    ours, theirs = Column(), Column()
    for value in (1051.2, 1020.0, 1080.4):
        ours.add("owned again", "ms", value)
    theirs.add("owned again", "ms", math.inf)
    theirs.add("moved", "", 0)
    text = table({TAILRACE: ours, KAFKA: theirs})
    assert [line.split("   ") for line in text.splitlines()][1][0] == "owned again"
    assert "1,051 (1,020 .. 1,080)" in text
    assert "not in 60 s   ms" in text
    assert (
        len(
            {
                line.rindex(word) + len(word)
                for line, word in zip(text.splitlines(), (KAFKA, "60 s", "0"), strict=True)
            }
        )
        == 1
    )
    assert as_rows({KAFKA: theirs})[0] == {
        "contender": KAFKA,
        "name": "owned again",
        "unit": "ms",
        "value": None,
        "values": [None],
    }


def test_what_a_killed_bench_has_started_dies_with_it() -> None:
    code = (
        "import subprocess, sys, signal, os\nfrom bench.peers.servers import tied\n"
        "child = subprocess.Popen(tied(['sh', '-c', 'echo up; exec sleep 600']), "
        "stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nprint(child.pid, flush=True)\nos.kill(os.getpid(), "
        "signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=ROOT,
        capture_output=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    pid = int(done.stdout)
    wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE,
        "the child has ended",
    )


def test_a_command_whose_parent_is_gone_does_not_start() -> None:
    command = tied(["echo", "started"])
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, timeout=HANG_LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
