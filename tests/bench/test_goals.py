"""Statements of the benches about their figures: goals from rows, memory that may be touched, what
Kafka's tool printed, tables between marks.
"""

from __future__ import annotations

import json
import pathlib

import pytest

from bench import doc_tables, write_docs
from bench.conditions import LEFT_BYTES, bytes_to_touch
from bench.peers.fixed_rates import parsed, summary
from bench.peers.goals import Goal, Values, goals, outcome
from bench.with_spark import spark_goals

GIB = 1 << 30
RATIO = Goal("ratio", "x", 3, True, lambda of: of("r", "ours") / of("r", "theirs"), "r")
MOST = Goal(
    "most", " us", 100, False, lambda of: of("r", "ours", "p50") - of("s", "ours", "p50"), "r"
)


def test_a_ratio_is_that_of_the_medians_with_the_spread_of_its_rounds() -> None:
    values: Values = {
        ("r", "ours", ""): [30.0, 90.0, 60.0],
        ("r", "theirs", ""): [10.0, 15.0, 30.0],
    }
    found = outcome(RATIO, values)
    assert (found.value, found.least, found.most, found.is_met) == (4.0, 2.0, 6.0, True)
    assert "goal >= 3x: met" in found.line()


def test_a_goal_that_is_missed_says_so_and_one_of_other_rows_waits_for_them() -> None:
    values: Values = {("r", "ours", "p50"): [500.0]}
    assert outcome(MOST, values).is_met is None
    assert "not measured" in outcome(MOST, values).line()
    found = outcome(MOST, {**values, ("s", "ours", "p50"): [300.0]})
    assert (found.value, found.is_met) == (200.0, False)
    assert "MISSED" in found.line()


def test_rows_with_other_numbers_of_rounds_do_not_break_a_goal() -> None:
    found = outcome(
        RATIO,
        {
            ("r", "ours", ""): [6.0, 6.0],
            ("r", "theirs", ""): [2.0, 2.0],
            ("later", "ours", ""): [1.0],
        },
    )
    assert found.is_met


def test_every_goal_that_can_be_had_is_computed_from_its_rows() -> None:
    seen: set[str] = set()

    def any_figure(row: str, contender: str, label: str = "") -> float:
        seen.add(row)
        assert contender
        assert not label or label.split()[-1] in (
            "p50",
            "p99",
            "p99.9",
            "ms",
            "MB",
            "idle",
            "acks=1",
        )
        return 2.0

    for goal in goals():
        seen.clear()
        goal.formula(any_figure)
        assert goal.row in seen, goal.name


def test_the_goals_of_sparks_reads_are_of_the_figures_that_the_bench_takes_and_wait_for_those_that_it_lacks() -> (  # noqa: E501
    None
):
    first: Values = {
        (spark_goals.FIRST, spark_goals.NEW_SESSION, ""): [4.5, 4.7],
        (spark_goals.FIRST, spark_goals.PREPARED, ""): [3.1, 3.2],
    }
    reads: Values = {
        (row, who, ""): [rate] * 5
        for row in (spark_goals.NOOP, spark_goals.AGGREGATE, spark_goals.COUNT)
        for who, rate in {
            spark_goals.SOURCE: 4.0, spark_goals.SOURCE_NAMED: 5.0, spark_goals.SCAN: 6.0,
            spark_goals.PARQUET: 8.0, spark_goals.KAFKA: 1.0,
        }.items()
    }  # fmt: skip
    found = {
        one.goal.name: (one.value, one.is_met)
        for one in (outcome(goal, {**first, **reads}) for goal in spark_goals.GOALS)
    }
    assert found == {
        "first query of a session": (4.6, False),
        "first query of a session, after spark_bridge.prepare()": (pytest.approx(3.15), True),
        "data source, scan to noop / Parquet": (0.5, False),
        "data source, scan to noop / Kafka connector": (4.0, True),
        "the same / Kafka connector with larger fetches": (None, None),
        "data source, aggregate of 3 columns / Parquet": (0.5, True),
        "spark_bridge.scan, scan to noop / Parquet": (0.75, False),
        "spark_bridge.scan, aggregate of 3 columns / Parquet": (0.75, True),
        'count through .schema("offset bigint") / count of all columns': (1.25, False),
    }


def test_the_spread_of_a_goal_is_over_its_own_rounds_however_few_another_figure_has() -> None:
    found = outcome(
        RATIO,
        {
            ("r", "ours", ""): [6.0, 6.0, 9.0],
            ("r", "theirs", ""): [2.0, 2.0, 1.0],
            ("other", "ours", ""): [1.0],
        },
    )
    assert (found.least, found.most) == (3.0, 9.0)


@pytest.mark.parametrize(
    ("available", "total", "shm_free", "group_free", "requested"),
    [
        (20 * GIB, 24 * GIB, 24 * GIB, None, int(0.7 * 20 * GIB)),
        (20 * GIB, 24 * GIB, 8 * GIB, None, 8 * GIB - (256 << 20)),
        (20 * GIB, 24 * GIB, 24 * GIB, 6 * GIB, 6 * GIB - LEFT_BYTES),
        (4 * GIB, 24 * GIB, 24 * GIB, None, GIB),
        (1 * GIB, 4 * GIB, 2 * GIB, None, 0),
    ],
)
def test_memory_is_touched_within_what_is_safe(
    available: int, total: int, shm_free: int, group_free: int | None, requested: int
) -> None:
    assert bytes_to_touch(available, total, shm_free, group_free) == requested


def test_the_last_summary_of_kafkas_tool_counts() -> None:
    said = (
        "5000 records sent, 9.9 records/sec (0.95 MB/sec), 12.0 ms avg latency, 80.0 ms max "
        "latency, 9 ms 50th, 70 ms 95th, 79 ms 99th, 80 ms 99.9th.\n"
        "2500 steady state records sent, 9.9 records/sec (0.95 MB/sec), 1.2 ms avg latency, 8.0 "
        "ms max latency, 1 ms 50th, 3 ms 95th, 7 ms 99th, 8 ms 99.9th.\n"
    )
    assert parsed(said) == {"p50": 1.0, "p99": 7.0}
    with pytest.raises(ValueError, match="no percentiles"):
        parsed("usage: kafka-producer-perf-test")


def test_a_summary_has_the_senders_lateness_beside() -> None:
    assert summary([1.0] * 99 + [50.0], [0.1] * 98 + [9.0, 9.0], 3) == {
        "p50": 1.0,
        "p99": 50.0,
        "sender late p99": 9.0,
        "undelivered": 3.0,
    }


def test_tables_go_between_their_marks_and_nothing_else_changes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- goals -->\nold\n<!-- /goals -->\nb\n")
    monkeypatch.setattr(write_docs, "PAGES", (page,))
    outcomes = [
        outcome(RATIO, {("r", "ours", ""): [9.0], ("r", "theirs", ""): [3.0]}).for_file(),
        outcome(MOST, {}).for_file(),
    ]
    machine = {"cpu": "c", "cores": 2, "date": "d", "commit": "e"}
    result = json.loads(
        json.dumps(
            {
                "command": "x",
                "machine": machine,
                "goals": outcomes,
                "left_out": ["Some peer is left out: it is not here"],
            }
        )
    )
    assert write_docs.write(doc_tables.tables_of(result)) == ["goals"]
    text = page.read_text()
    assert text.startswith("a\n<!-- goals -->\n`x` on c")
    assert text.endswith("<!-- /goals -->\nb\n")
    assert "| ratio | 3.00x (3.00 .. 3.00) | at least 3x | yes |" in text
    assert "| most | not measured | at most 100 us |  |" in text
    assert "old" not in text
    page.write_text(f"{text}<!-- spark -->\n<!-- /spark -->\n")
    figures = [
        {"name": "scan", "contender": "Kafka", "unit": "M rows/s", "median": 1.0, "min": 0.9,
        "max": 1.1, "of_parquet": 0.25, "m_rows_per_cpu_second": [0.5]},
        {"name": "first", "contender": "x", "unit": "s", "median": 1.0, "values": [1.0]},
    ]  # fmt: skip
    assert write_docs.write(
        doc_tables.tables_of({**result, "part": "spark", "figures": figures})
    ) == ["spark"]
    assert page.read_text().startswith(text)  # the goals beside peers stay as they are
    assert page.read_text().endswith(
        "|---|---|---|---|---|\n| scan | Kafka | 1.00 (0.90 .. 1.10) | 0.25 | 0.50 |\n<!-- /spark "
        "-->\n"
    )
    with pytest.raises(ValueError, match="no page has a part between"):
        write_docs.write({"budget": "table"})
    with pytest.raises(ValueError, match="no budget"):
        write_docs.write(doc_tables.tables_of({"machine": machine}))
