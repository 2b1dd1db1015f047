"""Lag of a streaming query behind its topics, under "@metrics" of a source's latestOffset in
Spark's progress reports.

Spark's interface for Python sources has no metrics of a source (the JVM's ReportsSourceMetrics, in
4.3), so they stand there. Names are those of Spark's Kafka source. Bytes are estimated from the
average of each partition, as Kafka's estimatedTotalBytesBehindLatest on Databricks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge.stream.offsets import Position
    from spark_bridge.stream.topic_view import View

METRICS = "@metrics"


def behind(end: Position, view: View, offsets_lost: int) -> dict[str, Any]:
    """Lag of the query after the batch that ends at `end`."""
    counts = {}
    for key, extent in view.extents.items():
        is_known = end.topic_ids.get(key.topic) == view.infos[key.topic].topic_id
        counts[key] = max(
            0, extent.end - max(extent.beginning, end.offsets.get(key, 0) if is_known else 0)
        )
    total = sum(counts.values())
    return {
        "minOffsetsBehindLatest": min(counts.values(), default=0),
        "maxOffsetsBehindLatest": max(counts.values(), default=0),
        "avgOffsetsBehindLatest": total / len(counts) if counts else 0.0,
        "offsetsBehindLatest": total,
        "estimatedTotalBytesBehindLatest": round(
            sum(count * view.extents[key].bytes_per_offset for key, count in counts.items())
        ),
        "offsetsLost": offsets_lost,
    }


def metrics(progress: Any) -> list[dict[str, Any]]:
    """Metrics of each tailrace source of a query: `metrics(query.lastProgress)`. `progress` may be
    the argument of a StreamingQueryListener, a dict, or None.
    """
    if progress is None:
        return []
    as_dict = progress if isinstance(progress, dict) else json.loads(progress.json)
    found = []
    for source in as_dict["sources"]:
        latest = source.get("latestOffset")
        latest = json.loads(latest) if isinstance(latest, str) else latest
        if isinstance(latest, dict) and METRICS in latest:
            found.append(latest[METRICS])
    return found
