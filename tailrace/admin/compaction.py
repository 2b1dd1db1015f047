"""Administration of compacted topics. `tailrace.Admin` has these methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps, Wait, Wakeup, operation
from tailrace.core.errors import CorruptBatchError, PartitionOfflineError, RequestTimeoutError
from tailrace.core.validation import name_of, whole
from tailrace.protocol.frame import Api

T = TypeVar("T")
FIRST_WAIT_MS = 10
LAST_WAIT_MS = 500
"""Shortest and longest wait between two looks at the progress. In between it is an eighth of the
time until now, so that the end of a cleaning is seen soon.
"""
Partitions = list[dict[str, Any]]


class CompactionAdmin:
    """The methods of `Admin` for compacted topics."""

    _connection: Connection

    def _run_steps(self, steps: Steps[T], /) -> T:
        raise NotImplementedError

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        raise NotImplementedError

    @operation
    def compact_topic(
        self,
        topic: str,
        *,
        timeout_ms: int | None = None,
        on_progress: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> Steps[list[dict[str, Any]]]:
        """Clean a compacted topic now, whatever its dirty ratio, and wait until that is done. The
        active segment is sealed then, and each record up to now whose key has a later one is gone.
        What is younger than min.compaction.lag.ms, or behind an open transaction, stays.

        Returns one dict for each partition: partition, state (`idle`, `cleaning`, `waits for
        readers`, `retrying`, `stopped`, `offline`), is_done, cleaned_below and log_end_offset
        (offsets), clean_bytes, dirty_bytes, dirty_since_us. `on_progress` is called with the same
        after each look.

        Raises UnknownTopicError, and InvalidSettingError if the topic is not compacted. Raises
        CorruptBatchError or PartitionOfflineError if a part cannot be cleaned, after the rest was.
        Raises RequestTimeoutError after `timeout_ms` (None: no limit); the cleaning goes on then.
        """
        self._connection.check_usable()
        name = name_of("topic", topic)
        until_ns = None
        if timeout_ms is not None:
            until_ns = self._connection.now_ns() + whole("timeout_ms", timeout_ms, 0) * 1_000_000
        request: dict[str, Any] = {"name": name}
        begun_ns = self._connection.now_ns()
        while True:
            answer = yield from self._call(Api.COMPACT_TOPIC, request)
            partitions: Partitions = answer["partitions"]
            if on_progress is not None:
                on_progress(partitions)
            if all(each["is_done"] for each in partitions):
                return _checked(name, partitions)
            request = {"name": name, "number": answer["number"]}
            now_ns = self._connection.now_ns()
            if until_ns is not None and now_ns >= until_ns:
                raise RequestTimeoutError(
                    f"topic {name!r} is not clean after {timeout_ms} ms (timeout_ms); the cleaning "
                    "goes on"
                )
            wait_ms = min(max(FIRST_WAIT_MS, (now_ns - begun_ns) // 8_000_000), LAST_WAIT_MS)
            retry_ns = now_ns + wait_ms * 1_000_000
            if until_ns is not None:
                retry_ns = min(retry_ns, until_ns)
            while self._connection.now_ns() < retry_ns:
                yield Wait(retry_ns, Wakeup())


def _checked(topic: str, partitions: Partitions) -> Partitions:
    """The partitions, if all could be cleaned. Raises CorruptBatchError, PartitionOfflineError."""
    for each in partitions:
        if each["state"] == "stopped":
            raise CorruptBatchError(
                f"{topic}-{each['partition']} has something behind offset {each['cleaned_below']} "
                "that cannot be read; it is clean up to there, and the appliance's log has the "
                "reason (event=cleaning_stopped)"
            )
    for each in partitions:
        if each["state"] == "offline":
            raise PartitionOfflineError(
                f"{topic}-{each['partition']} is offline: nothing of it was cleaned"
            )
    return partitions
