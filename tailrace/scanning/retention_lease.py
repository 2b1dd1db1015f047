"""The lease under which retention keeps what a scan reads.

Owner: the scan's iterator; a process that is killed leaves a lease that ends by itself after LEASE_MS.
Invariants: renewed by the one who reads, between two batches; a scan of an appliance that is away goes on without (it removes nothing meanwhile, and remembers
    leases), and so does one that gets none because there are as many as there may be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from tailrace.admin import Admin
from tailrace.client_log import logger
from tailrace.errors import InvalidRequestError, NotReachableError, RequestTimeoutError, TailraceError
from tailrace.records import TopicPartition

LEASE_MS = 300_000
RENEWED_AFTER_S = LEASE_MS / 3_000
ENDING_TIMEOUT_MS = 2_000


class Lease:
    """On some partitions, each from an offset on. It is taken by who plans (`Admin.lease_offsets`), renewed and ended here."""

    def __init__(self, bootstrap: str, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        """`name` empty: there is none, and nothing is done."""
        self._bootstrap = bootstrap
        self._name = name if offsets else ""
        self._offsets = dict(offsets)
        self._renewed_s = time.monotonic()
        self._pid = os.getpid()

    def renew_when_due(self) -> None:
        """Raises OffsetOutOfRangeError when it had ended, and retention was faster."""
        if not self._name or time.monotonic() - self._renewed_s < RENEWED_AFTER_S:
            return
        self._renewed_s = time.monotonic()
        try:
            with Admin(self._bootstrap, request_timeout_ms=ENDING_TIMEOUT_MS) as admin:
                take(admin, self._name, self._offsets)
        except (NotReachableError, RequestTimeoutError) as error:
            logger.warning("scan_lease_not_renewed lease=%s reason=%r", self._name, str(error))

    def end(self) -> None:
        """Give it back; a second time, or in a child of the process that took it, nothing is done."""
        if not self._name or os.getpid() != self._pid:
            return
        name, self._name = self._name, ""
        try:
            with Admin(self._bootstrap, request_timeout_ms=ENDING_TIMEOUT_MS) as admin:
                admin.lease_offsets(name, self._offsets, 0)
        except TailraceError as error:
            logger.info("scan_lease_left lease=%s ends_after_ms=%d reason=%r", name, LEASE_MS, str(error))


def take(admin: Admin, name: str, offsets: Mapping[TopicPartition, int], ttl_ms: int = LEASE_MS) -> bool:
    """Lease these partitions; returns whether there was room for it. Raises OffsetOutOfRangeError when an offset is gone already."""
    try:
        admin.lease_offsets(name, offsets, ttl_ms)
    except InvalidRequestError as error:
        logger.warning("scan_without_lease lease=%s reason=%r", name, str(error))
        return False
    return True
