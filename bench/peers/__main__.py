"""`make bench-peers [ROUNDS=5] [ONLY=text]`: Apache Kafka, Redis Streams, NATS JetStream and ours,
the same work on the same cores and disk.

Before anything is measured the machine's memory is touched once (bench/conditions.py; TOUCH=0
leaves it out). Each row runs its contenders in turn, `ROUNDS` times, beginning with another one
each time; what is stated is the median with least and most, and the ratio to ours; below a row
stand the goals that follow from it (goals.py). All servers are up, idle while it is not their turn.
What cannot be had here is left out with a sentence. Beside each contender stands when an
acknowledged record is on the disk: a peer that does not sync is met with `durability=memory`, and
ours with `disk` is shown beside it. The raw pyzmq pipe and the disk written in sequence are the
ceilings. Results go to bench/results; those of a part (ONLY, in a row's name or key; several with
commas) to a file of their own.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from bench.conditions import Conditions
from bench.measure import RESULTS
from bench.peers.field import Field
from bench.peers.goals import Outcome, goals, outcome
from bench.peers.row import Entry, Result, Row
from bench.peers.rows import rows
from tailrace.core.errors import TailraceError

console = Console(soft_wrap=True, highlight=False, record=True, width=150)
Values = dict[tuple[str, str, str], list[float]]


def take(entry: Entry, failures: list[str]) -> Result | None:
    """One round of one contender, tried twice: None when both failed. A long run does not end for
    one of them, and says so.
    """
    for _ in range(2):
        try:
            return entry.once()
        except (
            TailraceError,
            RuntimeError,
            ValueError,
            OSError,
            subprocess.SubprocessError,
        ) as error:
            failures.append(f"{entry.name} failed: {error}")
            console.print(f"  {failures[-1]}", style="red", markup=False)
    return None


def run(row: Row, rounds: int, values: Values, failures: list[str]) -> list[dict[str, Any]]:
    """All contenders in turn; who begins changes with each round. What was measured is added to
    `values`; who failed twice in a round is left out.
    """
    entries = list(row.entries)
    for number in range(rounds):
        for entry in [
            row.entries[(position + number) % len(row.entries)]
            for position in range(len(row.entries))
        ]:
            result = take(entry, failures) if entry in entries else None
            if result is None:
                entries = [other for other in entries if other is not entry]
                continue
            for label, value in (result if isinstance(result, dict) else {"": result}).items():
                values.setdefault((row.key, entry.key, label), []).append(value)
    for key in [
        key
        for key in values
        if key[0] == row.key and key[1] not in {entry.key for entry in entries}
    ]:
        del values[key]
    lines = []
    first = row.entries[0]
    for entry in row.entries:
        for (_, _, label), each in [
            (key, each) for key, each in values.items() if key[:2] == (row.key, entry.key)
        ]:
            ours = values.get((row.key, first.key, label))
            ratio = (
                statistics.median(ours) / statistics.median(each)
                if ours
                and statistics.median(each)
                and "late" not in label
                and "undelivered" not in label
                else None
            )
            lines.append({
                "row": row.name, "key": row.key, "label": label, "contender": entry.name,
                "contender_key": entry.key, "durability": entry.durability,
                "unit": row.unit, "median": statistics.median(each), "min": min(each),
                "max": max(each), "ours_to_this": ratio, "values": each,
            })  # fmt: skip
    return lines


def show(row: Row, lines: list[dict[str, Any]]) -> None:
    digits = 2 if row.unit in ("ms", "") else 1
    for line in lines:
        if line["label"].endswith("undelivered") and not line["max"]:
            continue
        name = f"{line['contender']} ({line['durability']})"
        is_first = line["contender_key"] == row.entries[0].key
        ratio = "" if is_first or line["ours_to_this"] is None else f"{line['ours_to_this']:.2f}"
        figures = " ".join(f"{line[which]:>12,.{digits}f}" for which in ("median", "min", "max"))
        console.print(f"  {name:<54} {line['label']:<24} {figures}  {ratio:>7}")


def requested_rows(field: Field, directory: str, only: str) -> list[Row]:
    """Those that ONLY names, in their name or key."""
    texts = [text.strip() for text in only.split(",") if text.strip()]
    return [
        row
        for row in rows(field, directory)
        if not texts or any(text in row.name or text in row.key for text in texts)
    ]


class Results:
    """Lines and outcomes of a run, and their file."""

    def __init__(self, only: str, rounds: int, conditions: Conditions) -> None:
        where = conditions.report()
        part = "-" + re.sub(r"\W+", "-", only).strip("-") if only else ""
        self.path = RESULTS / f"peers-{where['date']}-{where['commit']}{part}.json"
        self._command = f"ROUNDS={rounds} {f'ONLY={only!r} ' if only else ''}make bench-peers"
        self._conditions = conditions
        self.left_out: list[str] = []
        self.lines: list[dict[str, Any]] = []
        self.outcomes: list[Outcome] = []
        self.failures: list[str] = []
        self.values: Values = {}
        RESULTS.mkdir(exist_ok=True)

    def keep(self, *, is_complete: bool) -> None:
        """Write the file. A run that is ended early has measured something."""
        kept = {
            "command": self._command, "machine": self._conditions.report(),
            "complete": is_complete, "left_out": self.left_out, "failures": self.failures,
            "goals": [one.for_file() for one in self.outcomes], "lines": self.lines,
        }  # fmt: skip
        self.path.write_text(json.dumps(kept, indent=1) + "\n")

    def take(self, row: Row, rounds: int) -> None:
        """Measure a row, and print it with the goals that it decides."""
        console.print(
            f"\n{row.name}{', ' if row.unit else ''}{row.unit}  [{row.key}]",
            style="bold",
            markup=False,
        )
        found = run(row, rounds, self.values, self.failures)
        show(row, found)
        self.lines += found
        for goal in goals():
            if goal.row == row.key:
                self.outcomes.append(outcome(goal, self.values))
                _print_outcome(self.outcomes[-1])

    def print_goals(self) -> None:
        """Print all outcomes once more, and their count."""
        console.print("\nGoals", style="bold")
        for one in self.outcomes:
            _print_outcome(one)
        met = [one.is_met for one in self.outcomes]
        console.print(
            f"  {met.count(True)} met, {met.count(False)} missed, {met.count(None)} not measured; "
            f"{len(self.failures)} failures"
        )


def _print_outcome(one: Outcome) -> None:
    console.print(one.line(), style="" if one.is_met is not False else "red")


def main() -> int:
    rounds, only = int(os.environ.get("ROUNDS", "5")), os.environ.get("ONLY", "")
    conditions = Conditions()
    where = conditions.report()
    console.print(
        f"[bold]Tailrace and its peers[/bold] on {where['cpu']}, {where['cores']} cores, commit "
        f"{where['commit']}, {rounds} rounds\n{conditions.sentence()}"
    )
    results = Results(only, rounds, conditions)
    with ExitStack() as stack:
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="tailrace-peers-", dir=os.environ.get("TAILRACE_BENCH_DIR")
            )
        )
        field = Field(stack, directory)
        results.left_out = field.missing
        for sentence in field.missing:
            console.print(sentence)
        begun = time.monotonic()
        for row in requested_rows(field, directory, only):
            row_begun = time.monotonic()
            results.take(row, rounds)
            console.print(
                f"  {time.monotonic() - row_begun:.0f} s, {(time.monotonic() - begun) / 60:.1f} "
                "min until now",
                style="dim",
            )
            results.keep(is_complete=False)
    results.keep(is_complete=True)
    results.print_goals()
    written = [results.path.name]
    if not only:
        console.save_svg(str(results.path.with_suffix(".svg")), title="make bench-peers")
        written.append(results.path.with_suffix(".svg").name)
    console.print(f"\nwritten to bench/results: {', '.join(written)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
