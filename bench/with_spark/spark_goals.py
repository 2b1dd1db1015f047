"""The goals of `make bench-spark`: which figures they are of, and what they have to reach. Pure.

The rows are keys of what is done (`noop`), the contenders those who do it (`data source`); figures
are M rows/s, of a first query seconds.
"""

from __future__ import annotations

from bench.peers.goals import Goal, ratio

SOURCE, SCAN, PARQUET = "data source", "spark_bridge.scan", "Parquet"
SOURCE_NAMED, SCAN_NAMED = f"{SOURCE}, columns named", f"{SCAN}, columns named"
KAFKA, KAFKA_LARGE = "Kafka", "Kafka, larger fetches"
NOOP, NOOP_TWO, AGGREGATE, COUNT, EXECUTORS = (
    "scan to noop, all columns",
    "scan to noop, key and value",
    "aggregate of 3 columns",
    "count",
    "over ZeroMQ to noop",
)
FIRST, NEW_SESSION, PREPARED = "first query of a session", "as it is", "after prepare()"
FIRST_QUERY_S = 4.0


def _first(name: str, contender: str) -> Goal:
    return Goal(name, " s", FIRST_QUERY_S, False, lambda of: of(FIRST, contender), FIRST)


GOALS = (
    _first("first query of a session", NEW_SESSION),
    _first("first query of a session, after spark_bridge.prepare()", PREPARED),
    ratio("data source, scan to noop / Parquet", 0.55, NOOP, SOURCE, PARQUET),
    ratio("data source, scan to noop / Kafka connector", 3, NOOP, SOURCE, KAFKA),
    ratio("the same / Kafka connector with larger fetches", 3, NOOP, SOURCE, KAFKA_LARGE),
    ratio("data source, aggregate of 3 columns / Parquet", 0.45, AGGREGATE, SOURCE, PARQUET),
    ratio("spark_bridge.scan, scan to noop / Parquet", 0.9, NOOP, SCAN, PARQUET),
    ratio("spark_bridge.scan, aggregate of 3 columns / Parquet", 0.6, AGGREGATE, SCAN, PARQUET),
    ratio(
        'count through .schema("offset bigint") / count of all columns',
        1.5,
        COUNT,
        SOURCE_NAMED,
        SOURCE,
    ),
)
