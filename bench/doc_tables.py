"""Tables of docs/performance.md and docs/measurements.md, made of results of bench-scale,
bench-peers and bench-spark.

`python -P -m bench.doc_tables FILE...` writes what each file of bench/results has: a budget
(microseconds per batch and stage), breadth, goals, Spark.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from typing import Any

from bench import write_docs
from bench.stages import budget


def _said(result: dict[str, Any]) -> str:
    where = result["machine"]
    return (
        f"`{result['command']}` on {where['cpu']}, {where['cores']} cores, {where['date']}, "
        f"commit {where['commit']}; {where.get('memory_touched', '')}.\n\n"
    )


def goals_table(result: dict[str, Any]) -> str:
    """The goals of a result of bench-peers."""
    text = (
        _said(result)
        + "| what | median (least .. most of the rounds) | goal | met |\n|---|---|---|---|\n"
    )
    for one in result["goals"]:
        unit = one["unit"] if one["unit"] == "x" else f" {one['unit']}"
        value = (
            "not measured"
            if one["value"] is None
            else f"{one['value']:,.2f}{unit} ({one['least']:,.2f} .. {one['most']:,.2f})"
        )
        met = {True: "yes", False: "no", None: ""}[one["met"]]
        text += (
            f"| {one['goal']} | {value} | "
            f"{'at least' if one['more_is_better'] else 'at most'} {one['bound']:g}{unit} | "
            f"{met} |\n"
        )
    left_out = "".join(f"{sentence}. " for sentence in result["left_out"])
    return f"{text}\n{left_out.strip()}\n" if left_out else text


def spark_table(result: dict[str, Any]) -> str:
    """The goals and figures of a result of bench-spark."""
    text = (
        goals_table(result)
        + "\n| what | who | M rows/s (least .. most) | of Parquet | M rows for a processor-second "
        "|\n|---|---|---|---|---|\n"
    )
    for one in result["figures"]:
        if one["unit"] == "s":
            continue
        of_parquet = f"{one['of_parquet']:.2f}" if one["of_parquet"] else ""
        per_cpu = statistics.median(one["m_rows_per_cpu_second"])
        text += (
            f"| {one['name']} | {one['contender']} | {one['median']:.2f} ({one['min']:.2f} .. "
            f"{one['max']:.2f}) | {of_parquet} | {per_cpu:.2f} |\n"
        )
    return text


def breadth_table(result: dict[str, Any]) -> str:
    """The breadth of a result of bench-scale."""
    parts = result["breadth"]
    text = _said(result) + "| what | measured |\n|---|---|\n"
    for row in parts["width"]:
        if row["name"] == "idle":
            text += (
                "| idle, with the 265 partitions of these rows | "
                f"{row['percent_of_a_core']:.2f} % of a core |\n"
            )
            continue
        goal = f"; {row['of_one']:.2f} of one partition (goal {row['goal']})" if row["goal"] else ""
        spread = (
            f"{statistics.median(row['rates']):,.0f} records/s ({min(row['rates']):,.0f} .. "
            f"{max(row['rates']):,.0f})"
        )
        text += f"| `send()` of 100 B to {row['name']} | {spread}{goal} |\n"
    many = parts["producers"]
    once = ", each once in the log" if many["all_once"] else ", NOT all once"
    each = (
        f"{many['slowest_producer_records_per_s']:,.0f} .. "
        f"{many['fastest_producer_records_per_s']:,.0f}"
    )
    memory = " → ".join(f"{value:.0f}" for value in many["pss_mb_before_connected_after"])
    text += (
        f"| {many['name']} | {many['acknowledged']:,} of {many['records']:,} records "
        f"acknowledged{once}; "
        f"{many['records_per_s']:,.0f} records/s together, one producer {each}; memory of the "
        f"appliance {memory} MB |\n"
    )
    idle = parts["connections"]

    def change(name: str, digits: int) -> str:
        before, with_them = idle[name]
        return f"{before:,.{digits}f} → {with_them:,.{digits}f}"

    return text + (
        f"| {idle['open']:,} {idle['name']} (bounded by {idle['bounded_by']}) | "
        f"{idle['kb_each']:.0f} kB each; "
        f"idle CPU {change('idle_percent_of_a_core', 2)} % of a core; "
        f"ack of one record beside them, acks=1, p50 {change('ack_p50_us', 0)} us, p99 "
        f"{change('ack_p99_us', 0)} us |\n"
    )


def tables_of(result: dict[str, Any]) -> dict[str, str]:
    """Name -> table of each part that the result has."""
    is_spark = result.get("part") == "spark"
    costs = result.get("budget") or (result if "passes" in result else None)
    found = {
        "budget": costs and budget.tables(costs),
        "breadth": "breadth" in result and breadth_table(result),
        "goals": "goals" in result and not is_spark and goals_table(result),
        "spark": is_spark and spark_table(result),
    }
    return {name: table for name, table in found.items() if table}


def main() -> int:
    for name in sys.argv[1:]:
        written = write_docs.write(
            tables_of(json.loads(pathlib.Path(name).read_text(encoding="utf-8")))
        )
        print(f"{name}: {', '.join(written)} written into docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
