"""A streaming query's view of its topics, over one connection for as long as the query runs.

Owner: the reader in Spark's long-lived Python process of the driver, one thread.
Invariants:
- Each request waits up to requestTimeoutMs for an appliance that does not answer; then
  NotReachableError names it.
- An appliance that comes back at the same address is asked again, and the query goes on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from spark_bridge.source.planner import ReadOptions
from tailrace.admin.admin import Admin
from tailrace.client.topics.list_offsets import check_offsets_answer
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import (
    NotReachableError,
    PartitionOutOfRangeError,
    RequestTimeoutError,
    TailraceError,
    UnknownTopicError,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.scanning import retention_lease as lease
from tailrace.scanning.sources.data_dirs import own_directories

RETRY_S = 0.1
QUESTION_MS = 5_000
"""Timeout of a request, which is then sent again on a new connection: one that outlived a restart
of the appliance may have lost it.
"""
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class LogExtent:
    """Offsets and bytes of one partition."""

    beginning: int
    end: int
    size_bytes: int

    @property
    def bytes_per_offset(self) -> float:
        """Average bytes of an offset on the disk."""
        return self.size_bytes / (self.end - self.beginning) if self.end > self.beginning else 0.0


@dataclass(frozen=True, slots=True)
class View:
    """The existing topics, and the partitions to read."""

    infos: dict[str, TopicInfo]
    extents: dict[TopicPartition, LogExtent]

    @property
    def topic_ids(self) -> dict[str, bytes]:
        """Topic ids by topic name."""
        return {name: info.topic_id for name, info in self.infos.items()}

    @property
    def ends(self) -> dict[TopicPartition, int]:
        """The log end offset of each partition."""
        return {key: extent.end for key, extent in self.extents.items()}


class Appliance:
    """The appliance that a query reads from."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._admin: Admin | None = None
        self._data_dirs: list[str] | None = None

    @property
    def admin(self) -> Admin:
        """The connection, opened on first use: most readers only read a task."""
        if self._admin is None:
            patience_ms = min(QUESTION_MS, self._options.request_timeout_ms)
            self._admin = Admin(
                self._options.bootstrap,
                client_id=self._options.client_id,
                request_timeout_ms=patience_ms,
            )
        return self._admin

    def close(self) -> None:
        """End the connection."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def data_dirs(self) -> list[str]:
        """The appliance's data directories on this host, asked for once. Readers check a
        directory's topic before they use it.
        """
        if self._data_dirs is None:
            self._data_dirs = (
                []
                if self._options.from_files is False
                else self._asked(lambda: own_directories(self.admin))
            )
        return self._data_dirs

    def view(self) -> View:
        """Look at the topics; those that do not exist are left out.

        Raises:
        - NotReachableError, PartitionOutOfRangeError.
        - The appliance's error, if it lasts longer than requestTimeoutMs.
        """
        return self._asked(
            self._view, UnknownTopicError
        )  # of a topic that was deleted between two questions

    def _asked(self, question: Callable[[], Answer], *also: type[TailraceError]) -> Answer:
        """Send a request, and retry while the error is `retriable` (a partition that a restarted
        appliance is still opening) or in `also`.
        """
        deadline_s = time.monotonic() + self._options.request_timeout_ms / 1000
        while True:
            try:
                return question()
            except TailraceError as error:
                is_away = isinstance(error, RequestTimeoutError | NotReachableError)
                if not (is_away or error.retriable or isinstance(error, also)):
                    raise
                if time.monotonic() >= deadline_s:
                    raise self._away(error) if is_away else error from None
                if is_away:
                    self.close()
                time.sleep(RETRY_S)

    def _away(self, error: TailraceError) -> NotReachableError:
        waited = f"requestTimeoutMs={self._options.request_timeout_ms}"
        return NotReachableError(
            f"the appliance at {self._options.bootstrap} has not answered the query for {waited}: "
            f"{error.detail}"
        )

    def _view(self) -> View:
        requested, pattern = self._options.requested, self._options.pattern
        infos = self._infos(
            [name for name in self.admin.list_topics() if re.fullmatch(pattern, name)]
            if pattern
            else list(requested)
        )
        keys = []
        for name, info in infos.items():
            count, chosen = len(info.partitions), requested.get(name)
            if chosen is not None and (beyond := [number for number in chosen if number >= count]):
                raise PartitionOutOfRangeError(
                    f"option assign names {name}-{beyond[0]}; topic {name!r} has partitions 0 "
                    f"to {count - 1}"
                )
            keys += [
                TopicPartition(name, number)
                for number in (range(count) if chosen is None else chosen)
            ]
        found: dict[TopicPartition, dict[str, Any]] = (
            self.admin.offsets(dict.fromkeys(keys, "latest")) if keys else {}
        )
        extent = {}
        for key, item in found.items():
            check_offsets_answer(item)
            extent[key] = LogExtent(item["beginning"], item["end"], item.get("size_bytes") or 0)
        return View(infos, extent)

    def _infos(self, names: list[str]) -> dict[str, TopicInfo]:
        try:
            return self.admin.topic_info(names) if names else {}
        except UnknownTopicError:
            there = self.admin.partition_counts()
            rest = [name for name in names if name in there]
            return self.admin.topic_info(rest) if rest else {}

    def acquire_lease(
        self,
        name: str,
        offsets: dict[TopicPartition, int],
        ttl_ms: int,
        topic_ids: dict[str, bytes],
    ) -> None:
        """Lease everything from these offsets on.

        Raises: OffsetOutOfRangeError, UnknownTopicError, NotReachableError.
        """
        self._asked(lambda: self._acquire_lease(name, offsets, ttl_ms, topic_ids))

    def _acquire_lease(
        self,
        name: str,
        offsets: dict[TopicPartition, int],
        ttl_ms: int,
        topic_ids: dict[str, bytes],
    ) -> None:
        lease.acquire(self.admin, name, offsets, ttl_ms, topic_ids=topic_ids)

    def end_lease(self, name: str, offsets: dict[TopicPartition, int]) -> None:
        """Release a lease, with a short timeout.

        Raises: TailraceError.
        """
        with Admin(
            self._options.bootstrap,
            client_id=self._options.client_id,
            request_timeout_ms=lease.ENDING_TIMEOUT_MS,
        ) as admin:
            admin.lease_offsets(name, offsets, 0)
