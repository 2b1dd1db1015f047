"""How far a streaming query is behind its topics: under "@metrics" of what Spark reports as a source's latestOffset.

Spark's interface for sources in Python has no metrics of a source's own (the JVM's ReportsSourceMetrics, in 4.3), so they stand there. Names are those of
Spark's Kafka source; bytes are estimated as Kafka's estimatedTotalBytesBehindLatest on Databricks: by the average of each partition.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge.stream_offsets import Position
    from spark_bridge.stream_view import View

METRICS = "@metrics"


def behind(end: Position, view: View, offsets_lost: int) -> dict[str, Any]:
    """What the query has yet to read when the batch that ends at `end` is done."""
    counts = {}
    for key, held in view.held.items():
        is_known = end.topic_ids.get(key.topic) == view.infos[key.topic].topic_id
        counts[key] = max(0, held.end - max(held.beginning, end.offsets.get(key, 0) if is_known else 0))
    total = sum(counts.values())
    return {
        "minOffsetsBehindLatest": min(counts.values(), default=0),
        "maxOffsetsBehindLatest": max(counts.values(), default=0),
        "avgOffsetsBehindLatest": total / len(counts) if counts else 0.0,
        "offsetsBehindLatest": total,
        "estimatedTotalBytesBehindLatest": round(sum(count * view.held[key].bytes_per_offset for key, count in counts.items())),
        "offsetsLost": offsets_lost,
    }


def metrics(progress: Any) -> list[dict[str, Any]]:
    """Of each tailrace source of a query: `metrics(query.lastProgress)`; progress may be what a StreamingQueryListener is given, a dict, or None."""
    if progress is None:
        return []
    told = progress if isinstance(progress, dict) else json.loads(progress.json)
    found = []
    for source in told["sources"]:
        latest = source.get("latestOffset")
        latest = json.loads(latest) if isinstance(latest, str) else latest
        if isinstance(latest, dict) and METRICS in latest:
            found.append(latest[METRICS])
    return found
