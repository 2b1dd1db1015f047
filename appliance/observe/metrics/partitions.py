"""Prometheus metrics of partitions: offsets, sizes, and counters of what came in and went out.

Pure: no I/O, no time. Bounds: `metrics.topics` topics have series of their own. Counters and sizes
of the others are one series with the topic `_other`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

from appliance.observe.metrics.metric_family import counter, gauge

OTHER = "_other"
_COUNTERS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float]], ...] = (
    (
        "appended_records",
        "Offsets given out since the topic was made.",
        lambda p: float(p.get("high_watermark", p["end"])),
    ),
    (
        "appended_batches",
        "Batches appended since the flusher started.",
        lambda p: float(p.get("appended_batches", 0)),
    ),
    (
        "appended_bytes",
        "Bytes appended since the flusher started.",
        lambda p: float(p.get("appended_bytes", 0)),
    ),
    (
        "fetched_records",
        "Offsets sent to readers since the front started.",
        lambda p: float(p.get("fetched", (0, 0))[0]),
    ),
    (
        "fetched_bytes",
        "Bytes sent to readers since the front started.",
        lambda p: float(p.get("fetched", (0, 0))[1]),
    ),
)
"""(name, text, value of an answer of `Admin.offsets`)."""


def partition_families(
    partitions: Sequence[Mapping[str, Any]], topics_max: int
) -> Iterator[Metric]:
    """Every family of partitions, once. Topics beyond `topics_max`, by name, are summed."""
    labels = ("topic", "partition")
    shown, summed = _bounded([p for p in partitions if not p["code"]], topics_max)
    of = {(str(p["topic"]), str(p["partition"])): p for p in shown}
    yield gauge(
        "tailrace_partition_log_start_offset",
        "Its first offset.",
        {key: p["beginning"] for key, p in of.items()},
        labels,
    )
    yield gauge(
        "tailrace_partition_high_watermark_offset",
        "Offset behind the last durable record.",
        {key: p.get("high_watermark", p["end"]) for key, p in of.items()},
        labels,
    )
    yield gauge(
        "tailrace_partition_last_stable_offset",
        "Offset behind the last committed record, where an open transaction holds readers back.",
        {key: p["end"] for key, p in of.items() if p["end"] != p.get("high_watermark", p["end"])},
        labels,
    )
    yield gauge(
        "tailrace_partition_size_bytes",
        "Its segments.",
        {
            **{key: p["size_bytes"] for key, p in of.items()},
            **({(OTHER, ""): sum(p["size_bytes"] for p in summed)} if summed else {}),
        },
        labels,
    )
    yield from _of_compaction(
        {key: p["compaction"] for key, p in of.items() if "compaction" in p}, labels
    )
    for name, doc, count_of in _COUNTERS:
        values = {key: count_of(p) for key, p in of.items()}
        if summed:
            values[OTHER, ""] = sum(map(count_of, summed))
        yield counter(f"tailrace_partition_{name}", doc, values, labels)
    yield gauge(
        "tailrace_partition_online",
        "1 if it accepts writes unless its disk is full (tailrace_log_dir_online), else 0.",
        {key: p["state"] == "ONLINE" for key, p in of.items()},
        labels,
    )
    yield gauge(
        "tailrace_topics_summed",
        "Topics without series of their own, above metrics.topics.",
        {(): len({p["topic"] for p in summed})},
    )


def _of_compaction(
    cleaned: Mapping[tuple[str, str], Mapping[str, Any]], labels: tuple[str, ...]
) -> Iterator[Metric]:
    """Partitions of compacted topics."""
    yield gauge(
        "tailrace_partition_dirty_ratio",
        "Compacted topic: part of the sealed bytes that can be cleaned and are not.",
        {
            key: p["dirty_bytes"] / max(1, p["dirty_bytes"] + p["clean_bytes"])
            for key, p in cleaned.items()
        },
        labels,
    )
    yield gauge(
        "tailrace_partition_dirty_since_timestamp_seconds",
        "Compacted topic: append time of the oldest record that can be cleaned and is not.",
        {key: p["dirty_since_us"] / 1e6 for key, p in cleaned.items() if p["dirty_since_us"]},
        labels,
    )
    yield gauge(
        "tailrace_partition_uncleanable",
        "Compacted topic: 1 if something of it cannot be read, and what follows is not cleaned.",
        {key: p["state"] == "stopped" for key, p in cleaned.items()},
        labels,
    )


def _bounded(
    partitions: Sequence[Mapping[str, Any]], topics_max: int
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """(partitions of the first topics by name, the others)."""
    names = set(sorted({p["topic"] for p in partitions})[:topics_max])
    shown = [p for p in partitions if p["topic"] in names]
    return shown, [p for p in partitions if p["topic"] not in names]
