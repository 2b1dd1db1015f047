"""What DESCRIBE_CLUSTER answers: processes, data directories, counts, topics whose delivery is paused, and a page of the partitions that take no writes.

Owner: the coordinator; reads only.
Bounds: a page of offline partitions takes at most half of what an answer may; `offline_next` begins the next one. At most PAUSED_MAX names of paused
    topics are said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from appliance.catalog import PartitionRow, Topic
from appliance.surroundings import Surroundings
from appliance.telling import Telling
from appliance.topic_decisions import shown_text
from shm.layout import SlotState
from tailrace.errors import InvalidRequestError
from tailrace.protocol.errors import ErrorCode

OFFLINE_PAGE = 200
PAUSED_MAX = 100


class ClusterDescription:
    """Of one appliance."""

    def __init__(
        self,
        topics: Mapping[str, Topic],
        telling: Telling,
        surroundings: Surroundings,
        cluster_id: str,
        answer_max: int,
    ) -> None:
        self._topics = topics
        self._telling = telling
        self._surroundings = surroundings
        self._cluster_id = cluster_id
        self._page_bytes_max = answer_max // 2

    def describe(self, request: dict[str, Any]) -> dict[str, Any]:
        """`offline_after`: [topic, partition], the last of the page before. Raises InvalidRequestError."""
        after = _after(request.get("offline_after"))
        count = size = 0
        offline = []
        for name in sorted(self._topics):
            topic = self._topics[name]
            for row in topic.partitions:
                state = self._telling.table(row).read(row.slot)
                count += not topic.delay_of
                size += state.size_bytes
                if state.state in (SlotState.OFFLINE_FOR_WRITES, SlotState.UNREADABLE):
                    offline.append((name, row))
        paused = sorted(name for name, topic in self._topics.items() if topic.given.get("delivery.paused") and not topic.delay_of)
        page, is_last = self._page([(name, row) for name, row in offline if (name, row.partition) > after])
        return {
            "cluster_id": self._cluster_id,
            "processes": self._surroundings.processes(),
            "data_dirs": self._surroundings.data_dirs(),
            "console": self._surroundings.console(),
            "topics": sum(not topic.delay_of for topic in self._topics.values()),
            "partitions": count,
            "bytes": size,
            "paused": paused[:PAUSED_MAX],
            "paused_count": len(paused),
            "offline": page,
            "offline_count": len(offline),
            "offline_next": None if is_last else [page[-1]["topic"], page[-1]["partition"]],
        }

    def _page(self, offline: list[tuple[str, PartitionRow]]) -> tuple[list[dict[str, Any]], bool]:
        """As many as fit, one at least, and whether these are all."""
        page: list[dict[str, Any]] = []
        size = 0
        for name, row in offline:
            entry = self._entry(name, row)
            size += len(orjson.dumps(entry)) + 1
            if page and (size > self._page_bytes_max or len(page) == OFFLINE_PAGE):
                return page, False
            page.append(entry)
        return page, True

    def _entry(self, name: str, row: PartitionRow) -> dict[str, Any]:
        known = self._surroundings.partition_file(self._telling.placement.dir_index(row), f"{name}-{row.partition}")
        return {
            "topic": name,
            "partition": row.partition,
            "code": ErrorCode(self._telling.table(row).read(row.slot).reason).name,
            "reason": shown_text(known.offline) if known is not None and known.offline else "see the appliance's log",
        }


def _after(given: Any) -> tuple[str, int]:
    if given is None:
        return "", -1
    if isinstance(given, list) and len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], int):
        return given[0], given[1]
    raise InvalidRequestError("offline_after is [topic, partition]: `offline_next` of the answer before")
