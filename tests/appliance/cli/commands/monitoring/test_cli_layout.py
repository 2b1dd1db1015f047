"""`tailrace layout`: on paper, and what runs is the same."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from appliance.cli.commands.monitoring.layout import command
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import children


def layout(*arguments: str) -> Any:
    done = CliRunner().invoke(command, ["--no-config", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_layout_on_paper_is_a_table_and_json() -> None:
    text = layout("--cores", "16", "--smt", "2", "--numa", "2")
    assert [line.split() for line in text.splitlines()[:4]] == [
        ["PROCESS", "CORES", "PHYSICAL", "NODE"],
        ["front-0", "0-1,8-9", "0-1", "0"],
        ["flusher-0", "0-1,8-9", "0-1", "0"],
        ["worker-0", "2", "2", "0"],
    ]
    assert "16 cores, 8 physical cores, 2 nodes" in text
    found = orjson.loads(layout("--cores", "16", "--smt", "2", "--numa", "2", "--json"))
    workers = [row for row in found["processes"] if row["process"].startswith("worker-")]
    assert [row["cores"] for row in workers] == [[2], [3]]
    assert {row["nodes"][0] for row in workers} == {0}


def test_a_layout_of_another_host_is_read_from_lscpu(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "cores"
    file.write_text("# CPU,Core,Node\n" + "".join(f"{n},{n % 4},0\n" for n in range(8)))
    assert "8 cores, 4 physical cores, 1 node" in layout("--topology", str(file))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cores", "7", "--smt", "2"], "7 cores cannot have 2 threads each on 1 nodes"),
        (["--smt", "2"], "--smt, --numa and --isolated need --cores"),
        (["--cores", "4", "--set", "cores=[9]"], "cores is [9]; list each core once, out of"),
        (["--cores", "4", "--set", "core=[9]"], "did you mean cores"),
        (["--cores", "4", "--isolated", "x"], "--isolated is 'x'; write 4-7,12"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_a_sentence(
    arguments: list[str], said: str
) -> None:
    done = CliRunner().invoke(command, ["--no-config", *arguments])
    assert done.exit_code != 0
    assert said in f"{done.output}{done.exception}"


def test_the_processes_run_where_the_layout_says(appliance: EmbeddedAppliance) -> None:
    pids = children(appliance)
    rows = {row["process"]: row for row in orjson.loads(layout("--json"))["processes"]}
    for name in ("front-0", "flusher-0", "worker-0"):
        assert os.sched_getaffinity(pids[f"tr-{name}"]) == (
            set(rows[name]["cores"] or ()) or os.sched_getaffinity(0)
        )
