"""What a streaming query's topics hold now, as the appliance says: one connection for as long as the query runs.

Owner: the reader in Spark's long-lived Python process of the driver, one thread.
Invariants: an appliance that is away is waited for, requestTimeoutMs for each question; then NotReachableError names it. One that comes back at the same
    address is asked again, so that the query goes on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from spark_bridge.planner import ReadOptions
from tailrace.admin import Admin
from tailrace.errors import NotReachableError, PartitionOutOfRangeError, RequestTimeoutError, TailraceError, UnknownTopicError
from tailrace.offset_lookup import check_offsets_answer
from tailrace.records import TopicPartition
from tailrace.scanning import lease
from tailrace.scanning.planner import own_directories
from tailrace.topics import TopicInfo

RETRY_S = 0.1
QUESTION_MS = 5_000
"""A question that has no answer by then is asked again on a connection of its own: one that outlived a restart of the appliance may have lost it."""
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Held:
    """What one partition holds."""

    beginning: int
    end: int
    size_bytes: int

    @property
    def bytes_per_offset(self) -> float:
        """On average, on the disk."""
        return self.size_bytes / (self.end - self.beginning) if self.end > self.beginning else 0.0


@dataclass(frozen=True, slots=True)
class View:
    """The topics that are there, and their partitions that are read."""

    infos: dict[str, TopicInfo]
    held: dict[TopicPartition, Held]

    @property
    def topic_ids(self) -> dict[str, bytes]:
        """By name."""
        return {name: info.topic_id for name, info in self.infos.items()}

    @property
    def ends(self) -> dict[TopicPartition, int]:
        """Where each partition ends."""
        return {key: held.end for key, held in self.held.items()}


class Appliance:
    """The appliance that a query reads from."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._admin: Admin | None = None
        self._data_dirs: list[str] | None = None

    @property
    def admin(self) -> Admin:
        """Opened when it is first needed: a reader is also made where nothing but a task is read."""
        if self._admin is None:
            patience_ms = min(QUESTION_MS, self._options.request_timeout_ms)
            self._admin = Admin(self._options.bootstrap, client_id=self._options.client_id, request_timeout_ms=patience_ms)
        return self._admin

    def close(self) -> None:
        """End the connection."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def data_dirs(self) -> list[str]:
        """The appliance's data directories that are on this host. Asked once: readers hold a directory against its topic before they use it."""
        if self._data_dirs is None:
            self._data_dirs = [] if self._options.from_files is False else self._asked(lambda: own_directories(self.admin))
        return self._data_dirs

    def look(self) -> View:
        """What is there; a topic that is not there is left out. Raises NotReachableError, PartitionOutOfRangeError, and what the appliance says for longer
        than requestTimeoutMs.
        """
        return self._asked(self._look, UnknownTopicError)  # of a topic that was deleted between two questions

    def _asked(self, question: Callable[[], Answer], *also: type[TailraceError]) -> Answer:
        """Its answer, asked again when that may help: what is `retriable` (a partition that a restarted appliance is still opening), and `also`."""
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
        return NotReachableError(f"the appliance at {self._options.bootstrap} has not answered the query for {waited}: {error.detail}")

    def _look(self) -> View:
        wanted, pattern = self._options.wanted, self._options.pattern
        infos = self._infos([name for name in self.admin.list_topics() if re.fullmatch(pattern, name)] if pattern else list(wanted))
        keys = []
        for name, info in infos.items():
            count, chosen = len(info.partitions), wanted.get(name)
            if chosen is not None and (beyond := [number for number in chosen if number >= count]):
                raise PartitionOutOfRangeError(f"option assign names {name}-{beyond[0]}; topic {name!r} has partitions 0 to {count - 1}")
            keys += [TopicPartition(name, number) for number in (range(count) if chosen is None else chosen)]
        found: dict[TopicPartition, dict[str, Any]] = self.admin.offsets(dict.fromkeys(keys, "latest")) if keys else {}
        held = {}
        for key, item in found.items():
            check_offsets_answer(item)
            held[key] = Held(item["beginning"], item["end"], item.get("size_bytes") or 0)
        return View(infos, held)

    def _infos(self, names: list[str]) -> dict[str, TopicInfo]:
        try:
            return self.admin.topic_info(names) if names else {}
        except UnknownTopicError:
            there = self.admin.partition_counts()
            rest = [name for name in names if name in there]
            return self.admin.topic_info(rest) if rest else {}

    def take_lease(self, name: str, offsets: dict[TopicPartition, int], ttl_ms: int) -> None:
        """Have retention keep everything from these offsets on. Raises OffsetOutOfRangeError, UnknownTopicError, NotReachableError."""
        self._asked(lambda: self._take_lease(name, offsets, ttl_ms))

    def _take_lease(self, name: str, offsets: dict[TopicPartition, int], ttl_ms: int) -> None:
        lease.take(self.admin, name, offsets, ttl_ms)

    def end_lease(self, name: str, offsets: dict[TopicPartition, int]) -> None:
        """Give it back, without waiting long. Raises TailraceError."""
        with Admin(self._options.bootstrap, client_id=self._options.client_id, request_timeout_ms=lease.ENDING_TIMEOUT_MS) as admin:
            admin.lease_offsets(name, offsets, 0)
