"""The answer to DESCRIBE_CLUSTER: processes, data directories, counts, paused topics, and a page of
the offline partitions.

Owner: the controller; reads only.
Bounds:
- A page of offline partitions takes at most half of an answer. `offline_next` begins the next page.
- At most PAUSED_MAX names of paused topics, and of partitions that cannot be compacted, are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from appliance.catalog.catalog import PartitionRow, Topic
from appliance.control.host_view import HostView
from appliance.control.publishing.metadata_publisher import MetadataPublisher
from appliance.control.request_fields import shown_text
from appliance.control.topics.bin import TopicBin
from shm.memory.layout import SlotState
from shm.tables.partition_table import CleaningState
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError

OFFLINE_PAGE = 200
PAUSED_MAX = 100


class ClusterDescription:
    """Builder of the description of one appliance."""

    def __init__(
        self,
        topics: Mapping[str, Topic],
        publisher: MetadataPublisher,
        host_view: HostView,
        topic_bin: TopicBin,
        cluster_id: str,
        answer_max: int,
    ) -> None:
        self._topics = topics
        self._publisher = publisher
        self._host_view = host_view
        self._bin = topic_bin
        self._cluster_id = cluster_id
        self._page_bytes_max = answer_max // 2
        self.moves: Callable[[], list[dict[str, Any]]] = list
        """Partitions that move (`appliance.control.moves.partition_moves`)."""
        self.audit: Callable[[], dict[str, Any] | None] = lambda: None
        """State of the audit log, None without one."""

    def describe(self, request: dict[str, Any]) -> dict[str, Any]:
        """`offline_after`: [topic, partition], the last of the page before. Raises
        InvalidRequestError.
        """
        after = _after(request.get("offline_after"))
        count = size = 0
        offline = []
        uncleanable = []
        for name in sorted(self._topics):
            topic = self._topics[name]
            for row in topic.partitions:
                state = self._publisher.table(row).read(row.slot)
                count += not topic.delay_of
                size += state.size_bytes
                if state.state in (SlotState.OFFLINE_FOR_WRITES, SlotState.UNREADABLE):
                    offline.append((name, row))
                if state.cleaning_state == CleaningState.STOPPED:
                    uncleanable.append(f"{name}-{row.partition}")
        paused = sorted(
            name
            for name, topic in self._topics.items()
            if topic.given.get("delivery.paused") and not topic.delay_of
        )
        page, is_last = self._page(
            [(name, row) for name, row in offline if (name, row.partition) > after]
        )
        return {
            "cluster_id": self._cluster_id,
            "processes": self._host_view.processes(),
            "data_dirs": self._host_view.data_dirs(),
            "memory": self._host_view.memory,
            "backups": self._host_view.backups(),
            "moves": self.moves(),
            "audit": self.audit(),
            "console": self._host_view.console(),
            "topics": sum(not topic.delay_of for topic in self._topics.values()),
            "partitions": count,
            "bytes": size,
            "bin": self._bin.summary(),
            "paused": paused[:PAUSED_MAX],
            "paused_count": len(paused),
            "uncleanable": uncleanable[:PAUSED_MAX],
            "uncleanable_count": len(uncleanable),
            "offline": page,
            "offline_count": len(offline),
            "offline_next": None if is_last else [page[-1]["topic"], page[-1]["partition"]],
        }

    def _page(self, offline: list[tuple[str, PartitionRow]]) -> tuple[list[dict[str, Any]], bool]:
        """The partitions that fit, at least one, and True if these are all."""
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
        known = self._host_view.partition_file(
            self._publisher.placement.dir_index(row), f"{name}-{row.partition}"
        )
        return {
            "topic": name,
            "partition": row.partition,
            "code": ErrorCode(self._publisher.table(row).read(row.slot).reason).name,
            "reason": shown_text(known.offline)
            if known is not None and known.offline
            else "see the appliance's log",
        }


def _after(given: Any) -> tuple[str, int]:
    if given is None:
        return "", -1
    if (
        isinstance(given, list)
        and len(given) == 2
        and isinstance(given[0], str)
        and isinstance(given[1], int)
    ):
        return given[0], given[1]
    raise InvalidRequestError(
        "offline_after must be [topic, partition]: pass `offline_next` of the previous answer"
    )
