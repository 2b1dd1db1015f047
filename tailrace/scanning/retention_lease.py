"""The retention lease of a scan: retention keeps the offsets that the scan reads.

Owner: the scan's iterator. After a kill the lease expires after LEASE_MS.

Invariants:
- The reader renews the lease between two batches.
- A scan continues without a lease while the appliance is away: it removes nothing then, and
  remembers leases.
- A scan continues without a lease if the limit of leases is reached.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from tailrace.admin.admin import Admin
from tailrace.core.errors import (
    InvalidRequestError,
    NotReachableError,
    RequestTimeoutError,
    TailraceError,
)
from tailrace.core.log import logger
from tailrace.core.topic_partition import TopicPartition

LEASE_MS = 300_000
RENEWED_AFTER_S = LEASE_MS / 3_000
ENDING_TIMEOUT_MS = 2_000


class Lease:
    """A lease on partitions, each from an offset on.

    The planner takes it (`Admin.lease_offsets`). It is renewed and ended here.
    """

    def __init__(
        self,
        bootstrap: str,
        name: str,
        offsets: Mapping[TopicPartition, int],
        topic_ids: Mapping[str, bytes] | None = None,
    ) -> None:
        """An empty `name` means that there is no lease, and nothing is done.

        `topic_ids` (name -> id) are those of the scanned topics.
        """
        self._bootstrap = bootstrap
        self._name = name if offsets else ""
        self._offsets = dict(offsets)
        self._topic_ids = dict(topic_ids or {})
        self._renewed_s = time.monotonic()
        self._pid = os.getpid()

    def renew_when_due(self) -> None:
        """Renew the lease if it is due.

        Raises OffsetOutOfRangeError if it had expired and retention has removed the offset,
        UnknownTopicError if the topic was deleted.
        """
        if not self._name or time.monotonic() - self._renewed_s < RENEWED_AFTER_S:
            return
        self._renewed_s = time.monotonic()
        try:
            with Admin(self._bootstrap, request_timeout_ms=ENDING_TIMEOUT_MS) as admin:
                acquire(admin, self._name, self._offsets, topic_ids=self._topic_ids)
        except (NotReachableError, RequestTimeoutError) as error:
            logger.warning("scan_lease_not_renewed lease=%s reason=%r", self._name, str(error))

    def end(self) -> None:
        """End the lease. Does nothing a second time, or in a child of the process that took it."""
        if not self._name or os.getpid() != self._pid:
            return
        name, self._name = self._name, ""
        try:
            with Admin(self._bootstrap, request_timeout_ms=ENDING_TIMEOUT_MS) as admin:
                admin.lease_offsets(name, self._offsets, 0, topic_ids=self._topic_ids)
        except TailraceError as error:
            logger.info(
                "scan_lease_left lease=%s ends_after_ms=%d reason=%r", name, LEASE_MS, str(error)
            )


def acquire(
    admin: Admin,
    name: str,
    offsets: Mapping[TopicPartition, int],
    ttl_ms: int = LEASE_MS,
    *,
    topic_ids: Mapping[str, bytes] | None = None,
) -> bool:
    """Lease these partitions. False if the limit of leases is reached.

    Raises OffsetOutOfRangeError if an offset is already removed, UnknownTopicIdError if a topic's
    id differs from `topic_ids` (name -> id).
    """
    try:
        admin.lease_offsets(name, offsets, ttl_ms, topic_ids=topic_ids)
    except InvalidRequestError as error:
        logger.warning("scan_without_lease lease=%s reason=%r", name, str(error))
        return False
    return True
