"""Requests of FETCH: decoded for the fetch service, answered and measured when they end.

Owner: one front.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netfront.fetch.fetch_service import FetchService
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.purgatory import Fetch
from netfront.fetch.reader_pool import AsyncReader
from netfront.partition_routes import PartitionRoutes
from netfront.session.responses import Responses
from netfront.session.sessions import Session
from netfront.session.time_slicing import TimeSlicer
from netfront.socket.transport import Transport
from shm.memory.layout import Measure, ProcessWord
from shm.runtime.agent_runner import Clock
from shm.runtime.logs.slow_operations import SLOW
from shm.runtime.timing_wheel import TimingWheel
from shm.tables.control import ProcessSlot
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import fetch_messages
from tailrace.protocol.fetch_messages import FetchedEntry
from tailrace.protocol.frame import Api, RequestHeader, WireError

if TYPE_CHECKING:
    from netfront.audit.audit_trail import AuditTrail


class FetchRequests:
    """Handler of FETCH, and the responses of `service`."""

    def __init__(
        self,
        *,
        reader: LogReader,
        routing: PartitionRoutes,
        pool: AsyncReader,
        wheel: TimingWheel[Fetch],
        transport: Transport,
        time_slicer: TimeSlicer,
        responses: Responses,
        slot: ProcessSlot,
        clock: Clock,
        now_ns: int,
    ) -> None:
        self._routing = routing
        self._responses = responses
        self._slot = slot
        self._clock = clock
        self._fetch_durations = slot.histogram(Measure.FETCH)
        self._delivery_durations = slot.histogram(Measure.DELIVERY)
        self.audit: AuditTrail | None = None
        """None: there is no audit log."""
        self.now_ns = now_ns
        """Time of this step."""
        self.service = FetchService(
            reader=reader, routing=routing, pool=pool, wheel=wheel, outgoing=transport,
            time_slicer=time_slicer, respond=self._respond, refuse=self._refuse,
        )  # fmt: skip

    def on_fetch(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Handle FETCH."""
        if len(body) != 1:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "FETCH takes one body frame")
        request = fetch_messages.decode_fetch(body[0], header.version)
        session.fetch_received = min(request.received_bytes, session.fetch_sent)
        self.service.begin(
            Fetch(session, header.version, header.correlation_id, request), self.now_ns
        )
        if self.audit is not None and self.audit.watches_data:
            read = {entry.topic_id for entry in request.entries}
            refuses = self._routing.refuses_read
            self.audit.accessed(
                session, "read", [one for one in read if not refuses(session.principal, one)]
            )

    def _respond(self, fetch: Fetch, entries: list[FetchedEntry], data: memoryview) -> None:
        listed = fetch_messages.encode_fetched(entries, fetch.version)
        self._slot.store(
            ProcessWord.BYTES_COUNT,
            self._slot.load(ProcessWord.BYTES_COUNT) + len(listed) + len(data),
        )
        duration_ns = self._clock.monotonic_ns() - fetch.begun_ns
        self._fetch_durations.add(duration_ns)
        if duration_ns > SLOW.limit_ns and not fetch.is_registered:
            self._responses.note_slow(
                fetch.session.word, Api.FETCH, fetch.correlation_id, duration_ns
            )
        if fetch.is_registered and fetch.newest_append_us:
            self._delivery_durations.add((self._clock.wall_us() - fetch.newest_append_us) * 1_000)
        self._responses.send_batches(
            fetch.session, Api.FETCH, fetch.version, fetch.correlation_id, listed, data
        )

    def _refuse(self, fetch: Fetch, error: Exception) -> None:
        self._responses.refuse_or_fail(
            fetch.session, Api.FETCH, fetch.version, fetch.correlation_id, error
        )
