"""Front: the agent of the front process. It steps the services that answer requests.

- `RequestDispatcher`: decodes requests, and calls their handlers.
- `ProduceService`: batches to the workers.
- `FetchRequests`: fetches.
- `LookupRequests`: METADATA and LIST_OFFSETS.
- `CreditService`: credit of producers.
- `CatalogFeed`: messages of the controller.
- `ForwardingService`: requests that other processes answer.
- `SessionLifecycle`: opens and closes sessions.
- `Responses`: sends everything.

Owner: its ZeroMQ socket, sessions and credits. In shared memory: the tails of its lanes and its
cursor in each ring.

Invariants:
- A request is answered once, or never with acks=0.
- No input ends the front. Input that does not parse is answered with an error code, or its
  connection is closed.
- A connection's batches reach their worker in the order of arrival.

Crash: none of its state survives. Clients see a new generation, reconnect, and resend batches that
were not acknowledged. Workers recognise duplicates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from netfront.agent.catalog_feed import CatalogFeed
from netfront.agent.credit_service import CreditService
from netfront.agent.fetch_requests import FetchRequests
from netfront.agent.lookup_requests import LookupRequests
from netfront.agent.request_body import one_frame
from netfront.agent.request_dispatcher import RECEIVE_LIMIT, Handler, RequestDispatcher
from netfront.fetch.log.log_bounds import LogBounds
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.lookup.metadata_service import MetadataService
from netfront.fetch.purgatory import Fetch
from netfront.fetch.reader_pool import AsyncReader
from netfront.forward.forwarder import ForwarderLink, OnDemand
from netfront.forward.forwarding_service import FORWARDED_APIS, ForwardingService
from netfront.limits import credit_budget
from netfront.partition_routes import PartitionRoutes
from netfront.produce.produce_service import ProduceService
from netfront.produce.worker_link import WorkerLink
from netfront.session.responses import Responses
from netfront.session.session_lifecycle import SessionLifecycle
from netfront.session.sessions import Session, Sessions
from netfront.session.time_slicing import TimeSlicer
from netfront.socket.flow_control import CreditLedger
from netfront.socket.transport import Transport
from shm.memory.layout import Measure, ProcessWord
from shm.queues.settled_notifications import SettledInterest
from shm.runtime.agent_runner import Clock
from shm.runtime.error_handler import CountedErrorHandler
from shm.runtime.timing_wheel import NEVER_NS, TimingWheel
from shm.tables.control import ProcessSlot
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.protocol import json_messages
from tailrace.protocol.frame import JSON_MAX_BYTES, Api, RequestHeader, WireError

if TYPE_CHECKING:
    from netfront.access.gate import Gate
    from netfront.access.producer_owners import ProducerOwners
    from netfront.audit.audit_trail import AuditTrail
    from netfront.quotas.quota_service import QuotaService
    from shm.rights.authorizer import Principal


logger = logging.getLogger(__name__)

CLOSE_UNUSED_NS = 5_000_000_000
"""Longest time that a segment which retention has removed keeps its room on the disk."""


class Links(NamedTuple):
    """The other processes of the appliance, as a front reaches them."""

    workers: dict[int, WorkerLink]
    connect_worker: Callable[[int], WorkerLink]
    """Returns the link to a dedicated worker."""
    controller: ForwarderLink
    scheduler: OnDemand
    groups: OnDemand
    front_ports: Callable[[], list[int]]
    decisions: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """See `MetadataService`."""


class Front:
    """Agent of the front process (see `shm.runtime.agent_runner`)."""

    def __init__(
        self,
        *,
        transport: Transport,
        generation: int,
        process_generation: int,
        links: Links,
        routing: PartitionRoutes,
        reader: LogReader,
        pool: AsyncReader,
        ledger: CreditLedger,
        slot: ProcessSlot,
        cluster_id: str,
        auto_create_topics: bool,
        on_ready: Callable[[], None],
        start_ns: int,
        clock: Clock,
        close_unused: Callable[[], bool] | None = None,
        fronts: int = 1,
        quotas: Sequence[str] = (),
        gate: Gate | None = None,
        audit: dict[str, Any] | None = None,
    ) -> None:
        """`gate` has the users and rights, where the appliance requires them.

        `close_unused`: see `PartitionFiles.close_unused`. `clock` measures; its
        wall time is that of append times. `fronts`: of the appliance. `quotas`: texts of
        their rules. `audit`: settings of the audit log; None: there is none.
        """
        self._front_count = fronts
        self._quotas: QuotaService | None = None
        """None: no quota was ever set."""
        self._audit: AuditTrail | None = None
        """None: there is no audit log."""
        self._transport = transport
        self._gate = gate
        self._routing = routing
        if gate is not None:
            gate.topic_name = routing.topic_name_of_hex
        self._reader = reader
        self.log_bounds = LogBounds(reader)
        """The epochs, starts and ends of its partitions' logs."""
        self._ledger = ledger
        self._slot = slot
        self._error_handler = CountedErrorHandler(slot)
        self._is_stopping = False
        self._close_unused = close_unused
        self._close_unused_at_ns = NEVER_NS
        """Time of the next check for deleted files that are open; NEVER_NS: none is open."""
        self._now_ns = start_ns
        self._clock = clock
        self._settled = SettledInterest(slot.cell(ProcessWord.NOTIFICATIONS_OFF))
        self._sessions = Sessions(generation)
        self._time_slicer = TimeSlicer()
        self._responses = Responses(
            transport, self._sessions, slot, self._error_handler, self._on_unreachable
        )
        self._credit_service = CreditService(ledger, self._responses, slot)
        self._fetch_wheel: TimingWheel[Fetch] = TimingWheel(start_ns)
        self._fetch_requests = FetchRequests(
            reader=reader, routing=routing, pool=pool, wheel=self._fetch_wheel,
            transport=transport, time_slicer=self._time_slicer, responses=self._responses,
            slot=slot, clock=clock, now_ns=start_ns,
        )  # fmt: skip
        self._fetches = self._fetch_requests.service
        self._metadata_service = MetadataService(
            routing, reader, links.front_ports, self._fetches.fetched, links.decisions
        )
        if gate is not None:
            self._metadata_service.tokens = gate.tokens
        self._described = {
            "cluster_id": cluster_id, "server": "tailrace", "auto_create_topics": auto_create_topics
        }  # fmt: skip
        """Response to a handshake."""
        self._produce_service = ProduceService(
            workers=links.workers, connect_worker=links.connect_worker, routing=routing,
            ledger=ledger,
            sessions=self._sessions, responses=self._responses,
            on_settled=self._fetches.on_settled, start_ns=start_ns,
            durations=slot.histogram(Measure.PRODUCE), exemplars=slot.exemplars,
            monotonic_ns=clock.monotonic_ns, wall_us=clock.wall_us,
        )  # fmt: skip
        self._acknowledgements = self._produce_service.acknowledgements
        self._catalog_feed = CatalogFeed(
            routing=routing, reader=reader, produce_service=self._produce_service,
            fetches=self._fetches, gate=gate, error_handler=self._error_handler, on_ready=on_ready,
        )  # fmt: skip
        self._forwarding = ForwardingService(
            controller=links.controller, scheduler=links.scheduler, groups=links.groups,
            process_generation=process_generation, sessions=self._sessions,
            responses=self._responses, start_ns=start_ns, gate=gate,
            on_assignment=self._catalog_feed.on_assignment,
            on_rights=self._catalog_feed.on_rights, on_fed=self._catalog_feed.on_fed,
        )  # fmt: skip
        self._owners: ProducerOwners | None = None
        if gate is not None:
            self._know_owners()
        self._session_lifecycle = self._new_session_lifecycle(start_ns)
        if gate is not None:
            self._session_lifecycle.server_keys = gate.server_keys
        self._dispatcher = RequestDispatcher(
            transport=transport, sessions=self._sessions, responses=self._responses,
            session_lifecycle=self._session_lifecycle, produce_service=self._produce_service,
            time_slicer=self._time_slicer, requests=slot.requests, gate=gate, now_ns=start_ns,
            catch_up=self._forwarding.catch_up,
        )  # fmt: skip
        self._dispatcher.handlers = self._handlers(gate)
        self._use_quotas(quotas)
        if audit is not None:
            self._begin_audit(audit)

    def _new_session_lifecycle(self, start_ns: int) -> SessionLifecycle:
        gate = self._gate
        return SessionLifecycle(
            transport=self._transport, sessions=self._sessions, ledger=self._ledger,
            responses=self._responses, slot=self._slot, error_handler=self._error_handler,
            described=self._described,
            forget=[
                self._fetches.forget_session, self._time_slicer.forget_session,
                self._produce_service.forget_session, self._forwarding.forget_session,
                self._forget_quotas,
                *([] if gate is None else [gate.forget]),
            ],
            start_ns=start_ns, admit=self._admit, note=self._note_session,
            has_users=gate is not None,
        )  # fmt: skip

    def _handlers(self, gate: Gate | None) -> dict[int, Handler]:
        """API -> its handler, which checks rights first where there are users."""
        lookups = LookupRequests(
            self._metadata_service, self._responses, self._time_slicer, self._transport
        )
        handlers: dict[int, Handler] = {
            Api.PING: self._on_ping,
            Api.PRODUCE: self._produce_service.take,
            Api.FETCH: self._fetch_requests.on_fetch,
            Api.METADATA: lookups.on_metadata,
            Api.LIST_OFFSETS: lookups.on_list_offsets,
            Api.CREDIT: self._credit_service.on_credit,
            Api.DESCRIBE_QUOTAS: self._on_describe_quotas,
            **dict.fromkeys(FORWARDED_APIS, self._on_forwarded),
        }
        if gate is not None:
            for api in gate.apis_to_check(handlers, FORWARDED_APIS):
                handlers[api] = _checked(gate, handlers[api])
        return handlers

    def _know_owners(self) -> None:
        from netfront.access.member_topics import MemberTopics
        from netfront.access.producer_owners import ProducerOwners

        self._forwarding.member_topics = MemberTopics()
        self._owners = ProducerOwners(self._forwarding.ask_for_itself)
        self._produce_service.owners = self._forwarding.owners = self._owners

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings of the appliance. New sessions get them, and credit from now on."""
        self._described["auto_create_topics"] = bool(settings["auto_create_topics"])
        self._credit_service.resize(credit_budget(settings))
        self._use_quotas(settings["quotas"])

    def _begin_audit(self, settings: dict[str, Any]) -> None:
        from netfront.audit.audit_trail import AuditTrail

        trail = AuditTrail(
            ask=self._forwarding.ask_for_itself,
            refuse=lambda session, header, error: self._responses.refuse(
                session.identity, session, header.api, header.version, header.correlation_id, error
            ),
            handle=self._handle_audited,
            is_open=lambda session: self._sessions.by_word(session.word) is session,
            address_of=self._transport.peer_address,
            topic_of=self._routing.name_of,
            prefixes=settings["data"],
        )
        self._audit = self._dispatcher.audit = self._fetch_requests.audit = trail
        self._responses.on_answered = trail.answered
        self._session_lifecycle.on_opened = trail.signed_in
        if trail.watches_data:
            self._produce_service.on_access = trail.accessed

    def _handle_audited(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Carry out a request whose event is on the disk."""
        try:
            self._on_forwarded(session, header, body)
        except WireError as error:
            self._responses.refuse(
                session.identity, session, header.api, header.version, header.correlation_id, error
            )
        except Exception as error:
            self._responses.fail(
                session.identity, session, header.api, header.version, header.correlation_id, error
            )

    def _use_quotas(self, rules: Sequence[str]) -> None:
        if self._quotas is None:
            if not rules:
                return
            from netfront.quotas.prefix_usage import PrefixUsage
            from netfront.quotas.quota_service import QuotaService

            quotas = QuotaService(
                ledger=self._ledger, sessions=self._sessions, responses=self._responses,
                throttles=self._slot.throttles, handle=self._dispatcher.handle_now,
                resume_fetch=self._fetches.resume_metered,
                prefixes=PrefixUsage(
                    self._routing, self._reader, self._produce_service.block,
                    self._forwarding.ask_for_itself,
                ),
                uses=self._slot.rate_uses, fronts=self._front_count, now_ns=self._now_ns,
            )  # fmt: skip
            self._quotas = self._session_lifecycle.quotas = self._dispatcher.quotas = quotas
        try:
            self._quotas.use_rules(rules, self._now_ns)
        except TailraceError as error:  # a rule of a newer version
            logger.error("quotas_not_applied error=%r", error.detail)

    @property
    def routes(self) -> PartitionRoutes:
        """Its copy of the catalog."""
        return self._routing

    @property
    def accepts_input(self) -> bool:
        """True while network input is read: from the first catalog until `begin_stop`."""
        return self._catalog_feed.is_complete and not self._is_stopping

    # ---- agent -----------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Read what the controller has sent: see `ForwardingService.catch_up`."""
        self._forwarding.catch_up()

    def step(self, now_ns: int) -> int:
        """Run one step of the loop. Return the amount of work done."""
        self._now_ns = self._produce_service.now_ns = self._forwarding.now_ns = now_ns
        self._dispatcher.now_ns = self._fetch_requests.now_ns = now_ns
        if self._owners is not None:
            self._owners.now_ns = now_ns
        work = self._forwarding.step()
        if self._quotas is not None:
            work += self._quotas.step(now_ns)
        if self._audit is not None:
            work += self._audit.step(now_ns)
        if self._fetches.has_more:
            work += self._fetches.check_moved()
        received = self._dispatcher.receive() if self.accepts_input else 0
        work += received + self._produce_service.pass_on() + self._forwarding.pass_on()
        work += self._produce_service.walk_rings()
        work += self._fetches.on_reads_completed(now_ns)
        if now_ns >= self._fetch_wheel.quiet_until_ns:
            work += self._fetches.on_timeouts(now_ns)
        if now_ns >= self._fetches.next_deadline_ns():
            work += self._fetches.on_drained(now_ns)
        if now_ns >= self._acknowledgements.next_deadline_ns():
            work += self._acknowledgements.answer_expired(now_ns)
        work += self._time_slicer.step()
        if now_ns >= self._session_lifecycle.next_deadline_ns():
            # Forward the ends of sessions at once: no event may wake this loop again.
            work += self._session_lifecycle.step(now_ns) + self._forwarding.pass_on()
        if self._close_unused is not None and (
            now_ns >= self._close_unused_at_ns or (work and self._close_unused_at_ns == NEVER_NS)
        ):
            self._close_unused_at_ns = (
                now_ns + CLOSE_UNUSED_NS if self._close_unused() or work else NEVER_NS
            )
        if self._gate is not None:
            work += self._end_refused(self._gate, now_ns)
        if self._ledger.is_contended:
            self._credit_service.sweep(now_ns, may_be_unread=received >= RECEIVE_LIMIT)
        if (
            self._settled.show(self._produce_service.has_unanswered() or self._fetches.has_delayed)
            and self._produce_service.has_more()
        ):
            work += 1
        if work:
            self._credit_service.show()
        return work

    def has_more(self) -> bool:
        """True if the next step has work to do at once."""
        return (
            bool(len(self._time_slicer))
            or self._fetches.has_more
            or self._produce_service.has_more()
        )

    def next_deadline_ns(self) -> int | None:
        """Return the time of the next step that is due without a message, or None."""
        deadline_ns = min(
            self._fetch_wheel.quiet_until_ns, self._fetches.next_deadline_ns(),
            self._acknowledgements.next_deadline_ns(), self._forwarding.next_deadline_ns(),
            self._session_lifecycle.next_deadline_ns(), self._close_unused_at_ns,
            self._credit_service.next_deadline_ns(),
            NEVER_NS if self._quotas is None else self._quotas.next_deadline_ns(),
            NEVER_NS if self._gate is None else self._gate.check_at_ns,
            NEVER_NS if self._audit is None else self._audit.next_deadline_ns(),
        )  # fmt: skip
        return deadline_ns if deadline_ns < NEVER_NS else None

    def begin_stop(self) -> None:
        """Stop reading. Requests read so far are still served."""
        self._is_stopping = True
        self._fetches.answer_all()

    def is_finished(self) -> bool:
        """True if every request that was read has been passed on and answered."""
        return not len(self._time_slicer) and self._produce_service.is_finished()

    # ---- users -----------------------------------------------------------------------------------

    def _admit(self, identity: bytes) -> Principal | None:
        """The principal of a connection that opens a session. Raises WireError."""
        if self._gate is None:
            return None
        try:
            return self._gate.admit(self._transport.claim(identity))
        except WireError as error:
            self._transport.close_peer(identity, error.detail)
            raise

    def end_session_of(self, identity: bytes) -> None:
        """End the session of an identity that belongs to another connection now."""
        self._session_lifecycle.drop_identity(identity)

    def throttle_ns(self, identity: bytes, quotas: Container[str]) -> int:
        """Time until a client's rates of these quotas allow more, 0 if they do."""
        session = None if self._quotas is None else self._sessions.by_identity(identity)
        if self._quotas is None or session is None:
            return 0
        return self._quotas.throttle_ns(session, quotas)

    def note_failed_login(self, user: str, address: str, reason: str) -> None:
        """Report a login that failed, where sign-ins are audited."""
        if self._audit is not None:
            self._audit.login_failed(user, address, reason)

    def _note_session(self, session: Session) -> None:
        if self._gate is not None:
            self._gate.note(session, self._transport.claim(session.identity))

    def _end_refused(self, gate: Gate, now_ns: int) -> int:
        """End the sessions of users that are not let in any more."""
        answered = gate.answer_connections() if self.accepts_input else 0
        ended = gate.take_ended(now_ns)
        for session, reason in ended:
            logger.info("session_ended client=%s reason=%r", session.client_id, reason)
            self._transport.close_peer(session.identity, reason)
            self._session_lifecycle.drop(session)
        return answered + len(ended)

    def _forget_quotas(self, session: Session) -> None:
        if self._quotas is not None:
            self._quotas.forget_session(session)
        if self._audit is not None:
            self._audit.forget(session)

    # ---- requests --------------------------------------------------------------------------------

    def _on_ping(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        if body:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "PING takes no body")
        self._responses.send(session, Api.PING, header.version, header.correlation_id, ErrorCode.OK)

    def _on_forwarded(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        limit = min(JSON_MAX_BYTES, self._forwarding.payload_max(header))
        frame = one_frame(self._time_slicer, header, body, limit)
        if session.quota is not None and header.api == Api.INIT_TRANSACTIONS:
            assert self._quotas is not None
            self._quotas.check_transactions(session, frame)
        self._forwarding.ask(session, header, frame)

    def _on_describe_quotas(
        self, session: Session, header: RequestHeader, body: list[bytes]
    ) -> None:
        json_messages.decode_request(one_frame(self._time_slicer, header, body))
        found = {"rules": [], "usage": []} if self._quotas is None else self._quotas.describe()
        self._responses.send(
            session, header.api, header.version, header.correlation_id, ErrorCode.OK,
            [json_messages.encode_json(found)],
        )  # fmt: skip

    def _on_unreachable(self, session: Session) -> None:
        """Drop the session of a client that cannot receive its response."""
        self._session_lifecycle.drop(session)


def _checked(gate: Gate, handler: Handler) -> Handler:
    """A handler that checks the rights of its request first."""

    def checked(session: Session, header: RequestHeader, body: list[bytes]) -> None:
        if session.principal is not None:
            request = json_messages.decode_request(body[0]) if body else {}
            gate.check(session.principal, header.api, request, b"")
        handler(session, header, body)

    return checked
