"""Whether a fetch has something to get, whether that is enough for its min_bytes, and how much its client may be sent.

Owner: one front; reads only.
Invariants: what a client has not reported as received stays below WINDOW_BYTES and one answer; what libzmq holds of answers stays below
    SESSION_UNSENT_MAX_BYTES and one answer for a client, and below UNSENT_HARD_MAX_BYTES and one answer for all.
"""

from __future__ import annotations

from netfront.fetch_entries import Outgoing
from netfront.log_reader import ColdRead, LogReader, LogReadError
from netfront.parked import Fetch
from netfront.routing import Routing
from netfront.slices import Slices
from tailrace.protocol.requests import FetchEntry

RESPONSE_MAX_BYTES = 16 << 20
WINDOW_BYTES = 64 << 20
"""What a client may not have reported as received."""
SESSION_UNSENT_MAX_BYTES = 24 << 20
UNSENT_MAX_BYTES = 64 << 20
UNSENT_HARD_MAX_BYTES = 96 << 20
"""Of answers that ZeroMQ still holds, for one client and for all. Between the second and the third, a client with nothing under way still gets SCARCE_BYTES."""
SCARCE_BYTES = 1 << 20
UNITS_OF_A_READ = 8
FEW_ENTRIES = 8
_SCRATCH_BYTES = 64 << 10


def allowance(fetch: Fetch, outgoing: Outgoing, *, is_stopping: bool) -> int | None:
    """How many bytes of batches its client may be sent now (0: an answer without); None: it has to take in what it was sent before."""
    session, request = fetch.session, fetch.request
    limit = min(request.max_bytes, RESPONSE_MAX_BYTES)
    if len(request.entries) <= FEW_ENTRIES:  # its buffer need be no larger than what its partitions may fill
        limit = min(limit, sum(entry.max_bytes for entry in request.entries))
    if session.fetch_sent - session.fetch_received >= WINDOW_BYTES:
        limit = 0
        if not fetch.wants_now:
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
    """Looks at the partitions of fetches, and counts."""

    def __init__(self, reader: LogReader, routing: Routing, slices: Slices) -> None:
        self._reader = reader
        self._routing = routing
        self._slices = slices
        self._scratch = bytearray(_SCRATCH_BYTES)

    def has_something(self, wanted: FetchEntry) -> bool:
        """Whether this partition has records at the wanted offset, or something is wrong with it: parking must not cost a buffer."""
        route = self._routing.find(wanted.topic_id, wanted.partition)
        if route is None:
            return True
        try:
            return self._reader.state(route).high_watermark != wanted.offset
        except LogReadError:
            return True

    def has_enough(self, fetch: Fetch, index: int) -> bool:
        """Of a fetch that fell short of its min_bytes: count what has come since in one partition, from where the last count ended."""
        wanted = fetch.request.entries[index]
        route = self._routing.find(wanted.topic_id, wanted.partition)
        if route is None:
            return True
        try:
            state = self._reader.state(route)
            while fetch.counted_bytes < fetch.min_bytes:
                place = fetch.counted_to.get(index)
                offset = wanted.offset if place is None else place.offset
                if offset >= state.high_watermark:
                    return False
                found = self._reader.read(route, state, offset, place, memoryview(self._scratch), False)
                if isinstance(found, int):
                    return True  # a batch larger than what is counted with
                self._slices.spend(UNITS_OF_A_READ)
                if found.end == found.start:
                    return False
                fetch.counted_bytes += found.end - found.start
                fetch.counted_to[index] = found.following
        except (LogReadError, ColdRead, OSError):
            return True
        return True
