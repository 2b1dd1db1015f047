"""Fetch progress: whether a fetch has data, whether that reaches min_bytes, and how much may be
sent.

Owner: one front; reads only.

Invariants:
- Bytes that a client has not reported as received stay below WINDOW_BYTES plus one response.
- Response bytes in libzmq stay below SESSION_UNSENT_MAX_BYTES plus one response for each client,
  and below UNSENT_HARD_MAX_BYTES plus one response for all.
"""

from __future__ import annotations

from netfront.fetch.fetch_response import Outgoing
from netfront.fetch.log.isolation import end_of, is_at_end, isolation_of
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.log.read_result import ColdRead, LogReadError
from netfront.fetch.purgatory import Fetch
from netfront.partition_routes import PartitionRoutes
from netfront.session.time_slicing import TimeSlicer
from tailrace.protocol.fetch_messages import FetchEntry

RESPONSE_MAX_BYTES = 16 << 20
WINDOW_BYTES = 64 << 20
"""Bytes sent to a client that it has not reported as received."""
SESSION_UNSENT_MAX_BYTES = 24 << 20
UNSENT_MAX_BYTES = 64 << 20
UNSENT_HARD_MAX_BYTES = 96 << 20
"""Response bytes held by ZeroMQ for one client and for all. Between UNSENT_MAX_BYTES and
UNSENT_HARD_MAX_BYTES a client without unsent bytes still gets SCARCE_BYTES.
"""
SCARCE_BYTES = 1 << 20
UNITS_OF_A_READ = 8
FEW_ENTRIES = 8
_SCRATCH_BYTES = 64 << 10


def allowance(fetch: Fetch, outgoing: Outgoing, *, is_stopping: bool) -> int | None:
    """Return the bytes of batches that the client may be sent now, or None if it must read earlier
    responses first. 0 allows a response without batches.
    """
    session, request = fetch.session, fetch.request
    limit = min(request.max_bytes, RESPONSE_MAX_BYTES)
    if len(request.entries) <= FEW_ENTRIES:
        # its buffer need be no larger than what its partitions may fill
        limit = min(limit, sum(entry.max_bytes for entry in request.entries))
    if session.fetch_sent - session.fetch_received >= WINDOW_BYTES:
        limit = 0
        if not fetch.is_immediate:
            return None
    if not is_stopping:
        unsent = outgoing.unsent_bytes(session.identity)
        if unsent >= SESSION_UNSENT_MAX_BYTES:
            return None
        total = outgoing.unsent_total()
        if total >= UNSENT_MAX_BYTES:
            if unsent or total >= UNSENT_HARD_MAX_BYTES:
                return None
            limit = min(limit, SCARCE_BYTES)
    return limit


class FetchProgress:
    """Checks the partitions of fetches and counts their new bytes."""

    def __init__(
        self, reader: LogReader, routing: PartitionRoutes, time_slicer: TimeSlicer
    ) -> None:
        self._reader = reader
        self._routing = routing
        self._time_slicer = time_slicer
        self._scratch = bytearray(_SCRATCH_BYTES)

    def has_something(self, fetch: Fetch, requested: FetchEntry) -> bool:
        """True if the partition has records at the requested offset, or an error. Parking must not
        cost a buffer.
        """
        route = self._routing.find(requested.topic_id, requested.partition)
        if route is None:
            return True
        principal = fetch.session.principal
        if principal is not None and self._routing.refuses_read(principal, requested.topic_id):
            return True
        try:
            isolation = isolation_of(fetch.version, requested.flags)
            return not is_at_end(self._reader.state(route), isolation, requested.offset)
        except LogReadError:
            return True

    def has_enough(self, fetch: Fetch, index: int) -> bool:
        """Count the new bytes of one partition for a fetch that fell short of min_bytes. Return
        True if min_bytes is reached or an error must be reported.
        """
        requested = fetch.request.entries[index]
        route = self._routing.find(requested.topic_id, requested.partition)
        if route is None:
            return True
        isolation = isolation_of(fetch.version, requested.flags)
        try:
            state = self._reader.state(route)
            while fetch.counted_bytes < fetch.min_bytes:
                place = fetch.counted_to.get(index)
                offset = requested.offset if place is None else place.offset
                if offset >= end_of(state, isolation):
                    return False
                found = self._reader.read(
                    route, state, offset, place, memoryview(self._scratch), False, isolation
                )
                if isinstance(found, int):
                    return True  # the next batch is larger than the scratch buffer
                self._time_slicer.spend(UNITS_OF_A_READ)
                if found.end == found.start and found.resume_offset < 0:
                    return False
                fetch.counted_bytes += found.end - found.start
                fetch.counted_to[index] = found.following
        except (LogReadError, ColdRead, OSError):
            return True
        return True
