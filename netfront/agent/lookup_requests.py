"""Requests of METADATA and LIST_OFFSETS: tasks that answer at once or in time slices.

Owner: one front.

Invariants: the client of a look-up reads its answers. One with too many unread bytes is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from netfront.agent.request_body import one_frame
from netfront.fetch.lookup.metadata_service import MetadataService
from netfront.session.responses import Responses
from netfront.session.sessions import Session
from netfront.session.time_slicing import Task, TimeSlicer
from netfront.socket.transport import Transport
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import RequestHeader, WireError

if TYPE_CHECKING:
    from shm.rights.authorizer import Principal


UNREAD_ANSWERS_MAX_BYTES = 8 << 20
"""Bytes of unread responses above which a client's METADATA and LIST_OFFSETS are refused."""
Lookup = Callable[[bytes, Callable[[bytes], None], "Principal | None"], Iterator[int]]


class LookupRequests:
    """Handlers of METADATA and LIST_OFFSETS."""

    def __init__(
        self,
        service: MetadataService,
        responses: Responses,
        time_slicer: TimeSlicer,
        transport: Transport,
    ) -> None:
        self._service = service
        self._responses = responses
        self._time_slicer = time_slicer
        self._transport = transport

    def on_metadata(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Handle METADATA."""
        self._submit_lookup(self._service.metadata, session, header, body)

    def on_list_offsets(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Handle LIST_OFFSETS."""
        self._submit_lookup(self._service.list_offsets, session, header, body)

    def _submit_lookup(
        self, lookup: Lookup, session: Session, header: RequestHeader, body: list[bytes]
    ) -> None:
        """Begin a task that sends its own response, at once or in time slices."""
        frame = one_frame(self._time_slicer, header, body)
        api, version, correlation_id = header.api, header.version, header.correlation_id

        def answer(found: bytes) -> None:
            unsent = self._transport.unsent_bytes(session.identity)
            if unsent >= UNREAD_ANSWERS_MAX_BYTES:
                raise WireError(
                    ErrorCode.TOO_MANY_REQUESTS,
                    f"this client has {unsent} bytes of unread responses; the limit is "
                    f"{UNREAD_ANSWERS_MAX_BYTES}. Read them first",
                )
            self._responses.send(session, api, version, correlation_id, ErrorCode.OK, [found])

        def on_error(error: Exception) -> None:
            self._responses.refuse_or_fail(session, api, version, correlation_id, error)

        self._time_slicer.begin(
            Task(session, len(frame), lambda: lookup(frame, answer, session.principal), on_error),
            try_now=True,
        )
