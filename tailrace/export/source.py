"""TopicSource: the exported topic on its appliance, with its offsets and scan plans.

Owner: one export, one thread. It holds a connection, which is made again after the appliance was
away.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from tailrace.admin.admin import Admin
from tailrace.client.topics.list_offsets import ready_offsets
from tailrace.core.errors import NotReachableError, RequestTimeoutError, UnknownTopicIdError
from tailrace.core.topic_partition import TopicPartition
from tailrace.scanning.options import Bounds, ScanSettings
from tailrace.scanning.planner import plan, topic_info
from tailrace.scanning.scan_plan import ScanPlan
from tailrace.scanning.sources.data_dirs import directory_of, own_directories
from tailrace.scanning.sources.local_source import LocalSource, read_partition_file

CLIENT_ID = "tailrace-export"
FOLLOW_TIMEOUT_MS, FOLLOW_CONNECT_MS = 5_000, 2_000
"""Timeouts of a survey in a continuous export, so that stopping it does not wait for an appliance
that is away. A slow appliance gets more time with each survey.
"""


@dataclass(frozen=True, slots=True)
class Survey:
    """The offsets of a topic at one time."""

    topic_id: str
    start_offsets: Mapping[int, int]
    settled: Mapping[int, int]
    sealed: Mapping[int, int]
    """The base offset of the active segment, for partitions whose files are here."""
    typed: bool


class TopicSource:
    """The topic on its appliance."""

    def __init__(
        self, topic: str, bootstrap: str, request_timeout_ms: int, connect_timeout_ms: int | None
    ) -> None:
        """`connect_timeout_ms` is for the first connection."""
        self.topic, self.bootstrap = topic, bootstrap
        self._timeout_ms, self._connect_ms = request_timeout_ms, connect_timeout_ms
        self._patience_ms = request_timeout_ms
        self._has_short_timeouts = False
        self._admin: Admin | None = None

    def close(self) -> None:
        """Close the connection. It is made again when needed."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def use_short_timeouts(self) -> None:
        """Use short timeouts from now on, since a failed survey is repeated."""
        self.close()
        self._has_short_timeouts = True
        self._patience_ms = min(FOLLOW_TIMEOUT_MS, self._timeout_ms)
        self._connect_ms = min(FOLLOW_CONNECT_MS, self._timeout_ms)

    def survey(self, *, with_sealed: bool) -> Survey:
        """Read the topic's offsets. Raises UnknownTopicError,
        NotReachableError, RequestTimeoutError.
        """
        try:
            return self._survey(with_sealed)
        except (NotReachableError, RequestTimeoutError) as error:
            self.close()
            if self._has_short_timeouts:
                # A slow appliance gets more time in the next survey; one that is away does not.
                is_slow = isinstance(error, RequestTimeoutError)
                self._patience_ms = min(
                    2 * self._patience_ms if is_slow else FOLLOW_TIMEOUT_MS, self._timeout_ms
                )
            raise

    def _survey(self, with_sealed: bool) -> Survey:
        if self._admin is None:
            self._admin = Admin(
                self.bootstrap,
                client_id=CLIENT_ID,
                request_timeout_ms=self._patience_ms,
                connect_timeout_ms=self._connect_ms,
            )
        admin = self._admin
        info = topic_info(admin, self.topic)
        self._connect_ms = self._connect_ms if self._has_short_timeouts else None
        keys = [TopicPartition(self.topic, number) for number in range(len(info.partitions))]
        found = {
            key.partition: item
            for key, item in ready_offsets(admin.offsets, keys, "latest", self._patience_ms).items()
        }
        sealed: dict[int, int] = {}
        directories = own_directories(admin) if with_sealed else []
        for number, item in found.items():
            where = directory_of(self.topic, number, info.topic_id, directories)
            known = read_partition_file(where) if where else None
            if known is not None:
                bases = LocalSource(where, known, headers_only=True, schema=info.schema).bases()
                sealed[number] = min(max(bases, default=0), item["end"])
        return Survey(
            info.topic_id.hex(),
            {number: item["beginning"] for number, item in found.items()},
            {number: item["end"] for number, item in found.items()},
            sealed,
            info.typed,
        )

    def schema(self, columns: list[str] | None, settings: ScanSettings) -> pa.Schema:
        """The schema of rows with these columns; None: all that the topic has and had.

        Raises InvalidSettingError for an unknown column.
        """
        return plan(
            self.topic,
            self.bootstrap,
            columns,
            Bounds("start", None),
            Bounds("end", None),
            settings,
            with_lease=False,
        ).schema

    def starts(
        self, survey: Survey, since: dt.datetime | None, settings: ScanSettings
    ) -> dict[int, int]:
        """The start offsets of an export: the first records, or the first at or after `since`.

        Raises as `plan`.
        """
        if since is None:
            return dict(survey.start_offsets)
        found = plan(
            self.topic,
            self.bootstrap,
            None,
            Bounds("start", since),
            Bounds("end", None),
            settings,
            with_lease=False,
        )
        starts = {r.partition: r.start for r in found.ranges}
        return {number: starts.get(number, end) for number, end in survey.settled.items()}

    def plan(
        self,
        columns: list[str],
        starts: Mapping[int, int],
        ends: Mapping[int, int],
        topic_id: str,
        settings: ScanSettings,
    ) -> ScanPlan:
        """A plan of these offsets under a lease.

        Raises OffsetOutOfRangeError if retention removed some, UnknownTopicError if the topic was
        created again.
        """
        made = plan(
            self.topic,
            self.bootstrap,
            columns,
            Bounds("start", dict(starts)),
            Bounds("end", dict(ends)),
            settings,
        )
        if made.ranges and made.ranges[0].topic_id.hex() != topic_id:
            raise UnknownTopicIdError(
                f"topic {self.topic!r} was deleted and created again while it was exported; export "
                "the new topic to another directory"
            )
        return made
