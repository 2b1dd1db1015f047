"""The topic that is exported, as the appliance tells: what it holds now, and the plan that reads a part of it.

Owner: one export, one thread; it holds a connection, which is made anew after the appliance was away.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from tailrace.admin import Admin
from tailrace.errors import NotReachableError, RequestTimeoutError, UnknownTopicError
from tailrace.offset_lookup import ready_offsets
from tailrace.records import TopicPartition
from tailrace.scanning.options import Bounds, ScanSettings
from tailrace.scanning.planner import PartitionRange as Range
from tailrace.scanning.planner import ScanPlan, _directory_of, _topic_info, own_directories, plan
from tailrace.scanning.segment_files import SegmentFiles, read_partition_file

CLIENT_ID = "tailrace-export"
LOOK_TIMEOUT_MS, LOOK_CONNECT_MS = 5_000, 2_000
"""Of a look at a topic that is followed: nobody who ends an export wants to wait for an appliance that is away. One that is slow gets more with each look."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Of a topic at one time."""

    topic_id: str
    beginnings: Mapping[int, int]
    settled: Mapping[int, int]
    sealed: Mapping[int, int]
    """Where the live segment begins; of partitions whose files are here."""
    typed: bool


class TopicSource:
    """See the module's docstring."""

    def __init__(self, topic: str, bootstrap: str, request_timeout_ms: int, connect_timeout_ms: int | None) -> None:
        """`connect_timeout_ms`: for the first connection."""
        self.topic, self.bootstrap = topic, bootstrap
        self._timeout_ms, self._connect_ms = request_timeout_ms, connect_timeout_ms
        self._patience_ms = request_timeout_ms
        self._looks_briefly = False
        self._admin: Admin | None = None

    def close(self) -> None:
        """End the connection; it is made again when it is needed."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def look_briefly(self) -> None:
        """From now on: a look that fails is followed by others."""
        self.close()
        self._looks_briefly = True
        self._patience_ms = min(LOOK_TIMEOUT_MS, self._timeout_ms)
        self._connect_ms = min(LOOK_CONNECT_MS, self._timeout_ms)

    def survey(self, *, with_sealed: bool) -> Survey:
        """Raises UnknownTopicError, NotReachableError, RequestTimeoutError."""
        try:
            return self._survey(with_sealed)
        except (NotReachableError, RequestTimeoutError) as error:
            self.close()
            if self._looks_briefly:  # an answer that does not come in time is looked for longer; what is away is not
                is_slow = isinstance(error, RequestTimeoutError)
                self._patience_ms = min(2 * self._patience_ms if is_slow else LOOK_TIMEOUT_MS, self._timeout_ms)
            raise

    def _survey(self, with_sealed: bool) -> Survey:
        if self._admin is None:
            self._admin = Admin(
                self.bootstrap, client_id=CLIENT_ID, request_timeout_ms=self._patience_ms, connect_timeout_ms=self._connect_ms
            )
        admin = self._admin
        info = _topic_info(admin, self.topic)
        self._connect_ms = self._connect_ms if self._looks_briefly else None
        keys = [TopicPartition(self.topic, number) for number in range(len(info.partitions))]
        found = {key.partition: item for key, item in ready_offsets(admin.offsets, keys, "latest", self._patience_ms).items()}
        sealed: dict[int, int] = {}
        directories = own_directories(admin) if with_sealed else []
        for number, item in found.items():
            where = _directory_of(Range(self.topic, info.topic_id, number, 0, 0), directories)
            known = read_partition_file(where) if where else None
            if known is not None:
                bases = SegmentFiles(where, known, headers_only=True, schema=info.schema).bases()
                sealed[number] = min(max(bases, default=0), item["end"])
        return Survey(
            info.topic_id.hex(),
            {number: item["beginning"] for number, item in found.items()},
            {number: item["end"] for number, item in found.items()},
            sealed,
            info.typed,
        )

    def schema(self, columns: list[str] | None, settings: ScanSettings) -> pa.Schema:
        """Of rows of these columns; None: of all that the topic has, and had in older segments. Raises InvalidSettingError for one that is none."""
        return plan(self.topic, self.bootstrap, columns, Bounds("start", None), Bounds("end", None), settings, with_lease=False).schema

    def starts(self, survey: Survey, since: dt.datetime | None, settings: ScanSettings) -> dict[int, int]:
        """Where an export begins: the first record, or the first of this time or later. Raises as `plan`."""
        if since is None:
            return dict(survey.beginnings)
        found = plan(self.topic, self.bootstrap, None, Bounds("start", since), Bounds("end", None), settings, with_lease=False)
        starts = {r.partition: r.start for r in found.ranges}
        return {number: starts.get(number, end) for number, end in survey.settled.items()}

    def plan(
        self, columns: list[str], starts: Mapping[int, int], ends: Mapping[int, int], topic_id: str, settings: ScanSettings
    ) -> ScanPlan:
        """Of these offsets, under a lease. Raises OffsetOutOfRangeError when retention was faster, UnknownTopicError when the topic was made again."""
        made = plan(self.topic, self.bootstrap, columns, Bounds("start", dict(starts)), Bounds("end", dict(ends)), settings)
        if made.ranges and made.ranges[0].topic_id.hex() != topic_id:
            raise UnknownTopicError(f"topic {self.topic!r} was deleted while it was exported, and made again")
        return made
