"""Front: the agent of the front process. It steps the services that answer requests.

- `RequestDispatcher`: decodes requests, and calls their handlers (`RequestHandlers`).
- `ProduceService`: batches to the workers.
- `FetchRequests`: fetches.
- `LookupRequests`: METADATA and LIST_OFFSETS.
- `CreditService`: credit of producers.
- `CatalogFeed`: messages of the controller.
- `ForwardingService`: requests that other processes answer.
- `SessionLifecycle`: opens and closes sessions; `UserSessions`: whose, where there are users.
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
from netfront.agent.request_dispatcher import RECEIVE_LIMIT, RequestDispatcher
from netfront.agent.request_handlers import RequestHandlers
from netfront.fetch.log.log_bounds import LogBounds
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.lookup.metadata_service import MetadataService
from netfront.fetch.purgatory import Fetch
from netfront.fetch.reader_pool import AsyncReader
from netfront.forward.forwarder import ForwarderLink, OnDemand
from netfront.forward.forwarding_service import ForwardingService
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
from tailrace.core.errors import TailraceError

if TYPE_CHECKING:
    from netfront.access.gate import Gate
    from netfront.access.producer_owners import ProducerOwners
    from netfront.agent.user_sessions import UserSessions
    from netfront.audit.audit_trail import AuditTrail
    from netfront.quotas.quota_service import QuotaService

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
        self._users: UserSessions | None = None
        """None: the appliance has no users."""
        self._owners: ProducerOwners | None = None
        self._transport = transport
        self._routing = routing
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
        self._fetch_requests = self._new_fetch_requests(pool)
        self._fetches = self._fetch_requests.service
        self._metadata_service = MetadataService(
            routing, reader, links.front_ports, self._fetches.fetched, links.decisions
        )
        self._described = {
            "cluster_id": cluster_id, "server": "tailrace", "auto_create_topics": auto_create_topics
        }  # fmt: skip
        """Response to a handshake."""
        self._produce_service = self._new_produce_service(links)
        self._acknowledgements = self._produce_service.acknowledgements
        self._catalog_feed = CatalogFeed(
            routing=routing, reader=reader, produce_service=self._produce_service,
            fetches=self._fetches, gate=gate, error_handler=self._error_handler, on_ready=on_ready,
        )  # fmt: skip
        self._forwarding = self._new_forwarding(links, process_generation, gate)
        if gate is not None:
            self._know_users(gate)
        self._session_lifecycle = self._new_session_lifecycle()
        self._dispatcher = self._new_dispatcher(gate)
        self._handlers = self._new_handlers()
        self._dispatcher.handlers = self._handlers.table(gate)
        self._use_quotas(quotas)
        if audit is not None:
            self._begin_audit(audit)

    def _new_fetch_requests(self, pool: AsyncReader) -> FetchRequests:
        return FetchRequests(
            reader=self._reader, routing=self._routing, pool=pool, wheel=self._fetch_wheel,
            transport=self._transport, time_slicer=self._time_slicer, responses=self._responses,
            slot=self._slot, clock=self._clock, now_ns=self._now_ns,
        )  # fmt: skip

    def _new_produce_service(self, links: Links) -> ProduceService:
        slot, clock = self._slot, self._clock
        return ProduceService(
            workers=links.workers, connect_worker=links.connect_worker, routing=self._routing,
            ledger=self._ledger, sessions=self._sessions, responses=self._responses,
            on_settled=self._fetches.on_settled, start_ns=self._now_ns,
            durations=slot.histogram(Measure.PRODUCE), exemplars=slot.exemplars,
            monotonic_ns=clock.monotonic_ns, wall_us=clock.wall_us,
        )  # fmt: skip

    def _new_forwarding(
        self, links: Links, process_generation: int, gate: Gate | None
    ) -> ForwardingService:
        return ForwardingService(
            controller=links.controller, scheduler=links.scheduler, groups=links.groups,
            process_generation=process_generation, sessions=self._sessions,
            responses=self._responses, start_ns=self._now_ns, gate=gate,
            on_assignment=self._catalog_feed.on_assignment,
            on_rights=self._catalog_feed.on_rights, on_fed=self._catalog_feed.on_fed,
        )  # fmt: skip

    def _new_dispatcher(self, gate: Gate | None) -> RequestDispatcher:
        return RequestDispatcher(
            transport=self._transport, sessions=self._sessions, responses=self._responses,
            session_lifecycle=self._session_lifecycle, produce_service=self._produce_service,
            time_slicer=self._time_slicer, requests=self._slot.requests, gate=gate,
            now_ns=self._now_ns, catch_up=self.catch_up,
        )  # fmt: skip

    def _new_handlers(self) -> RequestHandlers:
        lookups = LookupRequests(
            self._metadata_service, self._responses, self._time_slicer, self._transport
        )
        return RequestHandlers(
            produce_service=self._produce_service, fetch_requests=self._fetch_requests,
            lookups=lookups, credit_service=self._credit_service, forwarding=self._forwarding,
            responses=self._responses, time_slicer=self._time_slicer,
        )  # fmt: skip

    def _know_users(self, gate: Gate) -> None:
        """Let users in by their rights; producer ids and group members are theirs."""
        from netfront.access.member_topics import MemberTopics
        from netfront.access.producer_owners import ProducerOwners
        from netfront.agent.user_sessions import UserSessions

        gate.topic_name = self._routing.topic_name_of_hex
        self._metadata_service.tokens = gate.tokens
        self._users = UserSessions(gate, self._transport)
        self._forwarding.member_topics = MemberTopics()
        self._owners = ProducerOwners(self._forwarding.ask_for_itself)
        self._produce_service.owners = self._forwarding.owners = self._owners

    def _new_session_lifecycle(self) -> SessionLifecycle:
        users = self._users
        lifecycle = SessionLifecycle(
            transport=self._transport, sessions=self._sessions, ledger=self._ledger,
            responses=self._responses, slot=self._slot, error_handler=self._error_handler,
            described=self._described,
            forget=[
                self._fetches.forget_session, self._time_slicer.forget_session,
                self._produce_service.forget_session, self._forwarding.forget_session,
                self._forget_quotas,
                *([] if users is None else [users.gate.forget]),
            ],
            start_ns=self._now_ns, has_users=users is not None,
        )  # fmt: skip
        if users is not None:
            lifecycle.admit, lifecycle.note = users.admit, users.note
            lifecycle.server_keys = users.gate.server_keys
        return lifecycle

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings of the appliance. New sessions get them, and credit from now on."""
        self._described["auto_create_topics"] = bool(settings["auto_create_topics"])
        self._credit_service.resize(credit_budget(settings))
        self._use_quotas(settings["quotas"])

    def _begin_audit(self, settings: dict[str, Any]) -> None:
        from netfront.audit.audit_trail import AuditTrail

        trail = AuditTrail(
            ask=self._forwarding.ask_for_itself,
            refuse=self._handlers.refuse,
            handle=self._handlers.carry_out,
            is_open=lambda session: self._sessions.by_word(session.word) is session,
            address_of=self._transport.peer_address,
            topic_of=self._routing.name_of,
            prefixes=settings["data"],
        )
        self._audit = self._dispatcher.audit = self._fetch_requests.audit = trail
        self._responses.on_answered = trail.answered
        self._session_lifecycle.on_opened = trail.signed_in
        if self._users is not None:
            self._users.gate.on_unknown_key = trail.key_refused
        if trail.watches_data:
            self._produce_service.on_access = trail.accessed

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
            self._handlers.quotas = quotas
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
        """Read what the controller has sent: see `ForwardingService.catch_up`. Sessions that it
        ends have no further request handled.
        """
        self._forwarding.catch_up()
        self._end_refused()

    def _end_refused(self) -> int:
        """End the sessions that a change of users has just ended. Return the work done."""
        users = self._users
        if users is None or not users.gate.has_ended:
            return 0
        return users.end_refused(self._session_lifecycle, self._now_ns, answers_connections=False)

    def step(self, now_ns: int) -> int:
        """Run one step of the loop. Return the amount of work done."""
        self._now_ns = self._produce_service.now_ns = self._forwarding.now_ns = now_ns
        self._dispatcher.now_ns = self._fetch_requests.now_ns = now_ns
        if self._owners is not None:
            self._owners.now_ns = now_ns
        work = self._forwarding.step()
        work += self._end_refused()
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
        if self._users is not None:
            work += self._users.end_refused(
                self._session_lifecycle, now_ns, answers_connections=self.accepts_input
            )
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
            NEVER_NS if self._users is None else self._users.gate.check_at_ns,
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

    # ---- sessions --------------------------------------------------------------------------------

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

    @property
    def is_audited(self) -> bool:
        """True if there is an audit log."""
        return self._audit is not None

    def note_denial(self, identity: bytes, asker: dict[str, str], reason: str) -> None:
        """Report a part of a client's request that was denied before it came here. `asker`: the
        fields `user`, `client`, `address` and `api` of the event.
        """
        if self._audit is not None:
            self._audit.denied_before(self._sessions.by_identity(identity), asker, reason)

    def topics_of_member(self, user: str, group: str, member_id: str) -> list[str]:
        """The topics of a group's member, as far as its user's rights to them are checked here."""
        topics = self._forwarding.member_topics
        return [] if topics is None else topics.topics_of(user, group, member_id)

    def _forget_quotas(self, session: Session) -> None:
        if self._quotas is not None:
            self._quotas.forget_session(session)
        if self._audit is not None:
            self._audit.forget(session)

    def _on_unreachable(self, session: Session) -> None:
        """Drop the session of a client that cannot receive its response."""
        self._session_lifecycle.drop(session)
