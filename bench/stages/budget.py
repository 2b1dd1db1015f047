"""The budget of a batch: microseconds of CPU of each stage, context switches and page faults of
each process, at 1 KiB, 65 KiB and 1 MiB.

`python -P -m bench.stages.budget [--base COMMIT] [--rounds N] [--scale SHARE] [--write-docs]`; a
part of `make bench-scale`, which takes BASE=COMMIT and WRITE_DOCS=1. With a base, both trees are
measured in turn; who begins changes with each round. Medians of the rounds. `--write-docs` puts the
tables between the marks in docs/performance.md (`bench.doc_tables` does it for files of results).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

from bench import write_docs
from bench.measure import RESULTS, machine
from bench.other_tree import ROOT, environment_of, short_name, tree_of
from bench.stages.stage_costs import STAGES

ROUNDS = int(os.environ.get("ROUNDS", "5"))
PROCESSES = ("producer", "front", "worker", "flusher")
SHOWN = tuple(stage for stage in (*STAGES, "all") if stage != "others")
TITLES = {
    "producer I/O": "its I/O thread",
    "producer helpers": "its helper thread",
    "front I/O": "its I/O thread",
    "all": "**all**",
}
KIB = {"1 KiB": 1.1, "65 KiB": 73.6, "1 MiB": 997.0}
"""Size of a batch of each size in the log, about: 116 bytes a record."""
Pass = dict[str, Any]


def one_pass(tree: pathlib.Path, scale: float, only: str = "") -> Pass:
    """In a process of `tree`; `only`: of batches of this size."""
    command = [
        sys.executable,
        "-P",
        str(pathlib.Path(__file__).with_name("stage_costs.py")),
        "MEASURE",
        str(scale),
        only,
    ]
    done = subprocess.run(
        command, env=environment_of(tree), cwd=tree, stdout=subprocess.PIPE, check=True
    )
    return dict(json.loads(done.stdout))


def medians(passes: list[Pass]) -> Pass:
    """Medians of every figure of every case."""
    found: Pass = {}
    for case, first in passes[0].items():
        found[case] = {
            "batches_per_s": statistics.median(one[case]["batches_per_s"] for one in passes)
        }
        for kind in ("cpu_us", "switches", "faults"):
            found[case][kind] = {
                name: statistics.median(one[case][kind].get(name, 0.0) for one in passes)
                for name in first[kind]
            }
    return found


def lines(found: Pass) -> dict[str, dict[str, float]]:
    """Stage -> fixed microseconds and microseconds per KiB, of acks=1: the straight line with the
    least relative error.
    """
    import numpy as np

    fitted = {}
    for stage in (*PROCESSES, "all"):
        costs = np.array([of_process(found[f"{size}, acks=1"]["cpu_us"], stage) for size in KIB])
        slope, fixed = np.polyfit(
            np.array(list(KIB.values())), costs, 1, w=1 / np.maximum(costs, 1e-9)
        )
        fitted[stage] = {"fixed_us": float(fixed), "us_per_kib": float(slope)}
    return fitted


def of_process(costs: dict[str, float], process: str) -> float:
    """All threads of it."""
    return (
        costs["all"]
        if process == "all"
        else sum(
            value
            for stage, value in costs.items()
            if stage == process or stage.startswith(f"{process} ")
        )
    )


# ---- tables --------------------------------------------------------------------------------------


def _cell(now: float, before: float | None, digits: int) -> str:
    shown = f"{now:,.{digits}f}"
    return shown if before is None else f"{before:,.{digits}f} → {shown}"


def _row(
    title: str,
    names: tuple[str, ...],
    now: dict[str, float],
    before: dict[str, float] | None,
    digits: int,
) -> str:
    cells = (
        _cell(now.get(name, 0.0), None if before is None else before.get(name, 0.0), digits)
        for name in names
    )
    return f"| {title} | {' | '.join(cells)} |\n"


def _head(title: str, names: tuple[str, ...]) -> str:
    return (
        f"| {title} | {' | '.join(TITLES.get(name, name) for name in names)} "
        f"|\n|{'---|' * (len(names) + 1)}\n"
    )


def tables(result: dict[str, Any]) -> str:
    """The text between the marks."""
    now, before = result["now"], result.get("base")
    where = result["machine"]
    beside = f"; before is commit {result['base_commit']}, in turns" if before else ""
    text = (
        f"`{result['command']}` on {where['cpu']}, {where['cores']} cores, {where['date']}, "
        f"commit {where['commit']}, "
        f"medians of {result['rounds']} rounds{beside}.\n"
        "Microseconds of CPU per batch:\n\n"
    )
    text += _head("batch", SHOWN)
    for case in now:
        text += _row(case, SHOWN, now[case]["cpu_us"], before and before[case]["cpu_us"], 0)
    for kind, title in (
        ("switches", "context switches per batch"),
        ("faults", "page faults per batch"),
    ):
        text += "\n" + _head(title, PROCESSES)
        for case in now:
            text += _row(case, PROCESSES, now[case][kind], before and before[case][kind], 2)
    fitted, fitted_before = result["lines"], result.get("base_lines")
    text += (
        "\nA straight line through the three sizes, acks=1 (a process with its threads):\n\n| "
        "| fixed, us | us per KiB |\n|---|---|---|\n"
    )
    for stage, line in fitted.items():
        older = (fitted_before or {}).get(stage, {})
        text += (
            f"| {stage} | {_cell(line['fixed_us'], older.get('fixed_us'), 0)} | "
            f"{_cell(line['us_per_kib'], older.get('us_per_kib'), 2)} |\n"
        )
    return text


# ---- the run -------------------------------------------------------------------------------------


def run(base: str | None, rounds: int, scale: float, command: str) -> dict[str, Any]:
    """Measure; prints the tables."""
    with ExitStack() as stack:
        trees = {"now": ROOT}
        if base:
            trees["base"] = stack.enter_context(tree_of(base))
        passes: dict[str, list[Pass]] = {name: [] for name in trees}
        for number in range(rounds):
            for name in list(trees) if number % 2 == 0 else list(reversed(trees)):
                passes[name].append(one_pass(trees[name], scale))
    result: dict[str, Any] = {"command": command, "machine": machine(), "rounds": rounds}
    for name, found in passes.items():
        result[name] = medians(found)
    result["lines"] = lines(result["now"])
    if base:
        result |= {"base_commit": short_name(base), "base_lines": lines(result["base"])}
    result["passes"] = passes
    print(tables(result))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.stages.budget")
    parser.add_argument("--base")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the batches, for a quick look"
    )
    parser.add_argument("--write-docs", action="store_true")
    given = parser.parse_args()
    base = f" --base {short_name(given.base)}" if given.base else ""
    command = f"python -P -m bench.stages.budget{base}"
    result = run(given.base, given.rounds, given.scale, command)
    if given.scale == 1.0:
        where = result["machine"]
        path = RESULTS / f"budget-{where['date']}-{where['commit']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path.relative_to(RESULTS.parent.parent)}")
    if given.write_docs:
        write_docs.write({"budget": tables(result)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
