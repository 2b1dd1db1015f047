"""Request handlers: API -> the service that answers it, and the few requests that need no service.

Owner: one front.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netfront.agent.credit_service import CreditService
from netfront.agent.fetch_requests import FetchRequests
from netfront.agent.lookup_requests import LookupRequests
from netfront.agent.request_body import one_frame
from netfront.agent.request_dispatcher import Handler
from netfront.forward.forwarding_service import FORWARDED_APIS, ForwardingService
from netfront.produce.produce_service import ProduceService
from netfront.session.responses import Responses
from netfront.session.sessions import Session
from netfront.session.time_slicing import TimeSlicer
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import json_messages
from tailrace.protocol.frame import JSON_MAX_BYTES, Api, RequestHeader, WireError

if TYPE_CHECKING:
    from netfront.access.gate import Gate
    from netfront.quotas.quota_service import QuotaService


class RequestHandlers:
    """The handler of each API that clients call after their handshake."""

    def __init__(
        self,
        *,
        produce_service: ProduceService,
        fetch_requests: FetchRequests,
        lookups: LookupRequests,
        credit_service: CreditService,
        forwarding: ForwardingService,
        responses: Responses,
        time_slicer: TimeSlicer,
    ) -> None:
        self.quotas: QuotaService | None = None
        """None: no quota was ever set."""
        self._produce_service = produce_service
        self._fetch_requests = fetch_requests
        self._lookups = lookups
        self._credit_service = credit_service
        self._forwarding = forwarding
        self._responses = responses
        self._time_slicer = time_slicer

    def table(self, gate: Gate | None) -> dict[int, Handler]:
        """API -> its handler, which checks rights first where there are users."""
        handlers: dict[int, Handler] = {
            Api.PING: self._on_ping,
            Api.PRODUCE: self._produce_service.take,
            Api.FETCH: self._fetch_requests.on_fetch,
            Api.METADATA: self._lookups.on_metadata,
            Api.LIST_OFFSETS: self._lookups.on_list_offsets,
            Api.CREDIT: self._credit_service.on_credit,
            Api.DESCRIBE_QUOTAS: self._on_describe_quotas,
            **dict.fromkeys(FORWARDED_APIS, self._on_forwarded),
        }
        if gate is not None:
            for api in gate.apis_to_check(handlers, FORWARDED_APIS):
                handlers[api] = _checked(gate, handlers[api])
        return handlers

    def carry_out(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Carry out a request whose event is in the audit log."""
        try:
            self._on_forwarded(session, header, body)
        except WireError as error:
            self.refuse(session, header, error)
        except Exception as error:
            self._responses.fail(
                session.identity, session, header.api, header.version, header.correlation_id, error
            )

    def refuse(self, session: Session, header: RequestHeader, error: WireError) -> None:
        """Answer a request with an error."""
        self._responses.refuse(
            session.identity, session, header.api, header.version, header.correlation_id, error
        )

    def _on_ping(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        if body:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "PING takes no body")
        self._responses.send(session, Api.PING, header.version, header.correlation_id, ErrorCode.OK)

    def _on_forwarded(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        limit = min(JSON_MAX_BYTES, self._forwarding.payload_max(header))
        frame = one_frame(self._time_slicer, header, body, limit)
        if session.quota is not None and header.api == Api.INIT_TRANSACTIONS:
            assert self.quotas is not None
            self.quotas.check_transactions(session, frame)
        self._forwarding.ask(session, header, frame)

    def _on_describe_quotas(
        self, session: Session, header: RequestHeader, body: list[bytes]
    ) -> None:
        json_messages.decode_request(one_frame(self._time_slicer, header, body))
        found = {"rules": [], "usage": []} if self.quotas is None else self.quotas.describe()
        self._responses.send(
            session, header.api, header.version, header.correlation_id, ErrorCode.OK,
            [json_messages.encode_json(found)],
        )  # fmt: skip


def _checked(gate: Gate, handler: Handler) -> Handler:
    """A handler that checks the rights of its request first."""

    def checked(session: Session, header: RequestHeader, body: list[bytes]) -> None:
        if session.principal is not None:
            request = json_messages.decode_request(body[0]) if body else {}
            gate.check(session.principal, header.api, request, b"")
        handler(session, header, body)

    return checked
