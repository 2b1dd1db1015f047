"""One frame of `tailrace top` as lines of text: what is wrong first, then rates and latencies, then
topics, groups and processes, cut to a height.

Pure.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from appliance.cli.output import UNKNOWN, human_bytes, one_line, table_lines

SORTS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "rate": lambda row: (-row["records_per_s"], row["topic"]),
    "size": lambda row: (-row["bytes"], row["topic"]),
    "name": lambda row: row["topic"],
}
"""Order of topics."""
PROBLEMS_MAX = 8
TABLE_LINES = 3
"""Lines of a table beside its rows: its head, the number of those left out, an empty one."""
ROWS_MIN = 3
"""Rows of topics and of groups on the lowest terminal."""


class Line(NamedTuple):
    """A line with its style, which a pipe does not show."""

    text: str
    style: str = ""


def frame(state: Mapping[str, Any], address: str, sort: str, height: int | None) -> list[Line]:
    """The lines. `height`: of the terminal; None: everything."""
    head = [Line(_title(state, address), "bold"), *_problems(state), Line("")]
    if state["note"]:
        head.append(Line(state["note"], "yellow"))
    head += [Line(_rates(state["rates"])), Line(""), *_table(*_latencies(state["latencies"]))]
    processes = _table(*_processes(state["processes"]))
    left = None
    if height is not None:
        left = max(2 * ROWS_MIN, height - len(head) - len(processes) - 2 * TABLE_LINES)
    topics = sorted(state["topics"], key=SORTS[sort])
    groups = state["groups"]
    group_rows = len(groups) if left is None else min(len(groups), max(ROWS_MIN, left // 2))
    topic_rows = len(topics) if left is None else min(len(topics), left - group_rows)
    return [
        *head,
        *_table(*_topics(topics[:topic_rows]), more=len(topics) - topic_rows),
        *_table(*_groups(groups[:group_rows]), more=len(groups) - group_rows),
        *processes,
    ][:height]


def _title(state: Mapping[str, Any], address: str) -> str:
    time = dt.datetime.fromtimestamp(state["time_ms"] / 1000).strftime("%H:%M:%S")
    return f"tailrace {address}  {time}  over {state['interval_s']:.1f} s"


def _problems(state: Mapping[str, Any]) -> list[Line]:
    if state["error"]:
        return [Line(one_line(f"no front answers: {state['error']}"), "bold red")]
    found = [
        Line(
            one_line(f"{problem['level']}: {problem['check']}: {problem['detail']}"),
            "bold red" if problem["level"] == "problem" else "yellow",
        )
        for problem in state["problems"]
    ]
    if len(found) > PROBLEMS_MAX:
        more = len(found) - PROBLEMS_MAX + 1
        found = [*found[: PROBLEMS_MAX - 1], Line(f"and {more} more: tailrace doctor", "bold red")]
    return found or [Line("nothing is wrong", "green")]


def _rates(rates: Mapping[str, float | None]) -> str:
    def number(name: str, noun: str) -> str:
        value = rates[name]
        return f"{UNKNOWN if value is None else f'{value:,.0f}'} {noun}/s"

    sent = rates["sent_bytes_per_s"]
    return "   ".join(
        [
            number("records_per_s", "records in"), number("produce_requests_per_s", "produces"),
            number("fetch_requests_per_s", "fetches"), number("refused_per_s", "refused"),
            f"{UNKNOWN if sent is None else human_bytes(int(sent))}/s sent",
        ]
    )  # fmt: skip


def _latencies(latencies: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    return (
        ["LATENCY", "COUNT", "P50 MS", "P99 MS", "P99.9 MS"],
        [
            [name, row["count"], *(_ms(row[key]) for key in ("p50_ms", "p99_ms", "p999_ms"))]
            for name, row in latencies.items()
        ],
    )


def _ms(value: float | None) -> Any:
    return UNKNOWN if value is None else round(value, 2 if value < 10 else 0)


def _topics(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    return (
        ["TOPIC", "RECORDS/S", "RECORDS", "SIZE", "PARTITIONS", "OFFLINE"],
        [
            [row["topic"], row["records_per_s"], row["records"], human_bytes(row["bytes"]),
             row["partitions"], row["offline"]]
            for row in rows
        ],
    )  # fmt: skip


def _groups(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    return (
        ["GROUP", "LAG", "MEMBERS", "STATE", "KIND"],
        [
            [row["group"], UNKNOWN if row["lag"] is None else row["lag"], row["members"],
             row["state"], row["kind"]]
            for row in rows
        ],
    )  # fmt: skip


def _processes(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    return (
        ["PROCESS", "PID", "STATE", "CPU %", "PSS", "CORES", "RESTARTS", "ERRORS"],
        [
            [row["process"], row["pid"], row["state"],
             UNKNOWN if row["cpu_percent"] is None else row["cpu_percent"],
             UNKNOWN if row["pss_bytes"] is None else human_bytes(row["pss_bytes"]),
             row["cores"] or UNKNOWN, row["restarts"], row["errors"]]
            for row in rows
        ],
    )  # fmt: skip


def _table(columns: list[str], rows: list[list[Any]], more: int = 0) -> list[Line]:
    """A table with an empty line behind it; nothing without rows."""
    if not rows:
        return []
    head, *lines = table_lines(columns, rows)
    rest = [Line(f"and {more:,} more", "dim")] if more > 0 else []
    return [Line(head, "bold"), *map(Line, lines), *rest, Line("")]
