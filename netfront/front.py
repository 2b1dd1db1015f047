"""Front process: owns one address's socket, decodes requests, and dispatches each to its service.

- `ProduceService`: batches to the workers.
- `FetchService`: fetches.
- `MetadataService`: METADATA and LIST_OFFSETS.
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

Run it with `python -P -m netfront.front`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from netfront.fetch.fetch_service import FetchService
from netfront.fetch.log.file_reader import DiskFileReader, FileReader
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.log.read_result import LogReadError
from netfront.fetch.lookup.metadata_service import MetadataService
from netfront.fetch.purgatory import Fetch
from netfront.fetch.reader_pool import AsyncReader, ReaderPool
from netfront.forward.forwarder import ForwarderLink, OnDemand
from netfront.forward.forwarding_service import FORWARDED_APIS, ForwardingService
from netfront.limits import (
    credit_budget,
    limits,
    message_max_bytes,
    open_descriptor_count,
    open_files_max,
)
from netfront.partition_routes import PartitionRoutes
from netfront.produce.append_target import WorkerLink
from netfront.produce.produce_service import ProduceService
from netfront.produce.ring_acks import AckWalker
from netfront.session.responses import Responses
from netfront.session.session_lifecycle import SessionLifecycle
from netfront.session.sessions import Session, Sessions
from netfront.session.time_slicing import Task, TimeSlicer
from netfront.socket.flow_control import CreditLedger
from netfront.socket.listening_socket import AddressInUseError, ListeningSockets, SocketAccess
from netfront.socket.router import Router, Security
from netfront.socket.socket_stats import keep_freed_memory
from netfront.socket.transport import Transport
from shm.memory.layout import Measure, ProcessWord, RegionKind, Role
from shm.messages.lane_messages import Assignment
from shm.queues.ring import Ring
from shm.queues.settled_notifications import SettledInterest
from shm.runtime.agent_runner import (
    EXIT_ADDRESS_IN_USE,
    Clock,
    ProcessContext,
    configure_logging,
    process_name,
    run,
    start,
)
from shm.runtime.error_handler import CountedErrorHandler
from shm.runtime.logs.slow_operations import SLOW
from shm.runtime.timing_wheel import NEVER_NS, TimingWheel
from shm.tables.control import ProcessSlot
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.protocol import credit_messages, fetch_messages, json_messages
from tailrace.protocol.fetch_messages import FetchedEntry
from tailrace.protocol.frame import (
    API_VERSIONS,
    FRAMES_MAX,
    JSON_MAX_BYTES,
    Api,
    RequestHeader,
    WireError,
    check_body,
    decode_request_header,
    frames_max,
    undecodable_request,
)
from tailrace.protocol.listeners import front_address

if TYPE_CHECKING:
    from netfront.access.gate import Gate
    from netfront.access.producer_owners import ProducerOwners
    from netfront.audit.audit_trail import AuditTrail
    from netfront.quotas.quota_service import QuotaService
    from shm.rights.authorizer import Principal

logger = logging.getLogger(__name__)

RECEIVE_LIMIT = 256
"""Messages received in one step before other work gets its turn."""
UNREAD_ANSWERS_MAX_BYTES = 8 << 20
"""Bytes of unread responses above which a client's METADATA and LIST_OFFSETS are refused."""
EXIT_FAILED = 1
CLOSE_REMOVED_NS = 5_000_000_000
"""Longest time that a segment which retention has removed keeps its room on the disk."""
SWEEP_NS = 100_000_000
"""Interval of credit sweeps while producers wait for credit.

Credit unused for so long is taken back.
"""
Handler = Callable[[Session, RequestHeader, list[bytes]], None]
Lookup = Callable[[bytes, Callable[[bytes], None], "Principal | None"], Iterator[int]]


class Front:
    """Agent of the front process (see `shm.runtime.agent_runner`)."""

    def __init__(
        self,
        *,
        transport: Transport,
        generation: int,
        process_generation: int,
        workers: dict[int, WorkerLink],
        connect_worker: Callable[[int], WorkerLink],
        controller: ForwarderLink,
        scheduler: OnDemand,
        groups: OnDemand,
        front_ports: Callable[[], list[int]],
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
        close_removed: Callable[[], bool] | None = None,
        fronts: int = 1,
        quotas: Sequence[str] = (),
        gate: Gate | None = None,
        audit: dict[str, Any] | None = None,
    ) -> None:
        """`gate` has the users and rights, where the appliance requires them.

        `close_removed`: see `PartitionFiles.close_removed`. `clock` measures; its
        wall time is that of append times. `fronts`: of the appliance. `quotas`: texts of
        their rules. `audit`: settings of the audit log; None: there is none.
        """
        self._front_count = fronts
        self._quotas: QuotaService | None = None
        """None: no quota was ever set."""
        self._transport = transport
        self._gate = gate
        self._routing = routing
        if gate is not None:
            gate.topic_name = routing.topic_name_of_hex
        self._reader = reader
        self._ledger = ledger
        self._slot = slot
        self._error_handler = CountedErrorHandler(slot)
        self._on_ready = on_ready
        self._is_fed = False
        self._is_stopping = False
        self._sweep_at_ns = 0
        self._close_removed = close_removed
        self._close_removed_at_ns = NEVER_NS
        """Time of the next check for deleted files that are open; NEVER_NS: none is open."""
        self._now_ns = start_ns
        self._clock = clock
        self._requests = slot.requests
        self._credit = slot.credit
        self._show_credit()
        self._fetch_durations = slot.histogram(Measure.FETCH)
        self._delivery_durations = slot.histogram(Measure.DELIVERY)
        self._settled = SettledInterest(slot.cell(ProcessWord.NOTIFICATIONS_OFF))
        self._sessions = Sessions(generation)
        self._time_slicer = TimeSlicer()
        self._responses = Responses(
            transport, self._sessions, slot, self._error_handler, self._on_unreachable
        )
        self._fetch_wheel: TimingWheel[Fetch] = TimingWheel(start_ns)
        self._fetches = FetchService(
            reader=reader, routing=routing, pool=pool, wheel=self._fetch_wheel, outgoing=transport,
            time_slicer=self._time_slicer, respond=self._respond_fetch,
            refuse=self._refuse_fetch,
        )  # fmt: skip
        self._metadata_service = MetadataService(
            routing, reader, front_ports, self._fetches.fetched
        )
        if gate is not None:
            self._metadata_service.tokens = gate.tokens
        self._described = {
            "cluster_id": cluster_id, "server": "tailrace", "auto_create_topics": auto_create_topics
        }  # fmt: skip
        """Response to a handshake."""
        self._produce_service = ProduceService(
            workers=workers, connect_worker=connect_worker, routing=routing, ledger=ledger,
            sessions=self._sessions, responses=self._responses,
            on_settled=self._fetches.on_settled, start_ns=start_ns,
            durations=slot.histogram(Measure.PRODUCE), exemplars=slot.exemplars,
            monotonic_ns=clock.monotonic_ns, wall_us=clock.wall_us,
        )  # fmt: skip
        self._forwarding = ForwardingService(
            controller=controller, scheduler=scheduler, groups=groups,
            process_generation=process_generation, sessions=self._sessions,
            responses=self._responses, on_assignment=self._on_assignment,
            on_rights=self._on_rights, on_fed=self._on_fed, start_ns=start_ns, gate=gate,
        )  # fmt: skip
        self._owners: ProducerOwners | None = None
        if gate is not None:
            self._know_owners()
        self._session_lifecycle = SessionLifecycle(
            transport=transport, sessions=self._sessions, ledger=ledger, responses=self._responses,
            slot=slot, error_handler=self._error_handler,
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
        self._handlers: dict[int, Handler] = {
            Api.PING: self._on_ping,
            Api.PRODUCE: self._produce_service.take,
            Api.FETCH: self._on_fetch,
            Api.METADATA: self._on_metadata,
            Api.LIST_OFFSETS: self._on_list_offsets,
            Api.CREDIT: self._on_credit,
            Api.DESCRIBE_QUOTAS: self._on_describe_quotas,
            **dict.fromkeys(FORWARDED_APIS, self._on_decision),
        }
        if gate is not None:
            for api in gate.apis_to_check(self._handlers, FORWARDED_APIS):
                self._handlers[api] = self._checked(gate, self._handlers[api])
        self._use_quotas(quotas)
        self._audit: AuditTrail | None = None
        if audit is not None:
            self._begin_audit(audit)

    def _know_owners(self) -> None:
        from netfront.access.producer_owners import ProducerOwners
        from netfront.access.share_topics import ShareTopics

        self._forwarding.share_topics = ShareTopics()
        self._owners = ProducerOwners(self._forwarding.ask_for_itself)
        self._produce_service.owners = self._forwarding.owners = self._owners

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings of the appliance. New sessions get them, and credit from now on."""
        self._described["auto_create_topics"] = bool(settings["auto_create_topics"])
        self._responses.send_credit(self._ledger.resize(credit_budget(settings)))
        self._use_quotas(settings["quotas"])

    def _begin_audit(self, settings: dict[str, Any]) -> None:
        from netfront.audit.audit_trail import AuditTrail

        self._audit = trail = AuditTrail(
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
        self._responses.on_answered = trail.answered
        self._session_lifecycle.on_opened = trail.signed_in
        if trail.watches_data:
            self._produce_service.on_access = trail.accessed

    def _handle_audited(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Carry out a request whose event is on the disk."""
        try:
            self._on_decision(session, header, body)
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

            self._quotas = self._session_lifecycle.quotas = QuotaService(
                ledger=self._ledger, sessions=self._sessions, responses=self._responses,
                throttles=self._slot.throttles, handle=self._handle_now,
                resume_fetch=self._fetches.resume_metered,
                prefixes=PrefixUsage(
                    self._routing, self._reader, self._produce_service.block,
                    self._forwarding.ask_for_itself,
                ),
                fronts=self._front_count, now_ns=self._now_ns,
            )  # fmt: skip
        try:
            self._quotas.use_rules(rules, self._now_ns)
        except TailraceError as error:  # a rule of a newer version
            logger.error("quotas_not_applied error=%r", error.detail)

    @property
    def routes(self) -> PartitionRoutes:
        """Its copy of the catalog."""
        return self._routing

    def leader_epoch(self, route: Assignment) -> int:
        """The leader epoch of a partition, -1 while its log is not open."""
        try:
            return self._reader.state(route).leader_epoch
        except LogReadError:
            return -1

    def shown_offsets(self, route: Assignment) -> tuple[int, int]:
        """The log start offset and the high watermark of a partition, -1 each while its log is not
        open.
        """
        try:
            state = self._reader.state(route)
        except LogReadError:
            return -1, -1
        return state.log_start_offset, state.high_watermark

    def end_of_epoch(self, route: Assignment, epoch: int) -> tuple[int, int]:
        """Return a leader epoch, at most `epoch`, and where its records end; -1 each if that is not
        known.
        """
        try:
            state = self._reader.state(route)
        except LogReadError:
            return -1, -1
        if epoch == state.leader_epoch:
            return epoch, state.high_watermark
        if not 0 <= epoch < state.leader_epoch:
            return -1, -1
        end = self._reader.end_of_epoch(route, state, epoch)
        return (-1, -1) if end is None else (epoch, end)

    @property
    def accepts_input(self) -> bool:
        """True while network input is read: from the first catalog until `begin_stop`."""
        return self._is_fed and not self._is_stopping

    # ---- agent -----------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        """Run one step of the loop. Return the amount of work done."""
        self._now_ns = self._produce_service.now_ns = self._forwarding.now_ns = now_ns
        if self._owners is not None:
            self._owners.now_ns = now_ns
        work = self._forwarding.step()
        if self._quotas is not None:
            work += self._quotas.step(now_ns)
        if self._audit is not None:
            work += self._audit.step(now_ns)
        if self._fetches.has_more:
            work += self._fetches.check_moved()
        received = self._receive() if self.accepts_input else 0
        work += received + self._produce_service.pass_on() + self._forwarding.pass_on()
        work += self._produce_service.walk_rings()
        work += self._fetches.on_reads_completed(now_ns)
        if now_ns >= self._fetch_wheel.quiet_until_ns:
            work += self._fetches.on_timeouts(now_ns)
        if now_ns >= self._fetches.next_deadline_ns():
            work += self._fetches.on_drained(now_ns)
        if now_ns >= self._produce_service.next_deadline_ns():
            work += self._produce_service.answer_expired(now_ns)
        work += self._time_slicer.step()
        if now_ns >= self._session_lifecycle.next_deadline_ns():
            # Forward the ends of sessions at once: no event may wake this loop again.
            work += self._session_lifecycle.step(now_ns) + self._forwarding.pass_on()
        if self._close_removed is not None and (
            now_ns >= self._close_removed_at_ns or (work and self._close_removed_at_ns == NEVER_NS)
        ):
            self._close_removed_at_ns = (
                now_ns + CLOSE_REMOVED_NS if self._close_removed() or work else NEVER_NS
            )
        if self._gate is not None:
            work += self._end_refused(self._gate, now_ns)
        if self._ledger.is_contended and now_ns >= self._sweep_at_ns:
            self._sweep_at_ns = now_ns + SWEEP_NS
            if received < RECEIVE_LIMIT:  # otherwise batches that use the credit may be unread
                self._responses.send_credit(self._ledger.sweep())
        if (
            self._settled.show(self._produce_service.has_unanswered() or self._fetches.has_delayed)
            and self._produce_service.has_more()
        ):
            work += 1
        if work:
            self._show_credit()
        return work

    def _show_credit(self) -> None:
        ledger = self._ledger
        self._credit.store(ledger.outstanding_bytes, ledger.budget_bytes, ledger.waiting_count)

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
            self._produce_service.next_deadline_ns(), self._forwarding.next_deadline_ns(),
            self._session_lifecycle.next_deadline_ns(), self._close_removed_at_ns,
            self._sweep_at_ns if self._ledger.is_contended else NEVER_NS,
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

    # ---- assignments from the controller ---------------------------------------------------------

    def _on_fed(self) -> None:
        if self._gate is not None:
            self._gate.on_fed()
            self._fetches.check_rights()
        if not self._is_fed:
            self._is_fed = True
            self._on_ready()

    def _on_rights(self, payload: bytes, begins: bool) -> None:
        if self._gate is None:
            return
        try:
            self._gate.on_rights(payload, begins)
            self._fetches.check_rights()
        except Exception as error:
            self._error_handler.on_error("message=rights", error)

    def _on_assignment(self, payload: bytes) -> None:
        try:
            assignment = Assignment.decode(payload)
        except Exception as error:
            self._error_handler.on_error("message=assignment", error)
            return
        if not assignment.dropped:
            self._produce_service.reach(assignment.worker)
        try:
            known = self._routing.find(assignment.topic_id, assignment.partition)
            has_moved = known is not None and known.slot != assignment.slot
            gone = known if has_moved and known is not None else assignment
            if assignment.dropped or has_moved:
                self._reader.files.forget(gone)
            self._routing.apply(assignment)
            if assignment.dropped or has_moved:
                self._fetches.on_dropped(gone)
        except Exception as error:
            self._error_handler.on_error(
                f"message=assignment topic={assignment.topic} partition={assignment.partition}",
                error,
            )

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

    @staticmethod
    def _checked(gate: Gate, handler: Handler) -> Handler:
        """A handler that checks the rights of its request first."""

        def checked(session: Session, header: RequestHeader, body: list[bytes]) -> None:
            if session.principal is not None:
                request = json_messages.decode_request(body[0]) if body else {}
                gate.check(session.principal, header.api, request, b"")
            handler(session, header, body)

        return checked

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

    # ---- requests --------------------------------------------------------------------------------

    def _receive(self) -> int:
        count = 0
        while (
            count < RECEIVE_LIMIT
            and not self._time_slicer.is_spent
            and (frames := self._transport.try_receive()) is not None
        ):
            count += 1
            self._handle(frames)
        return count

    def _handle(self, frames: list[bytes]) -> None:
        """Handle one message, or park it until its session's quota of requests allows it."""
        session = self._sessions.by_identity(frames[0])
        if session is not None and session.quota is not None and self._parks(session, frames):
            return
        self._handle_of(session, frames)

    def _handle_now(self, frames: list[bytes]) -> None:
        """Handle one message whose quota was looked at."""
        self._handle_of(self._sessions.by_identity(frames[0]), frames)

    def _handle_of(self, session: Session | None, frames: list[bytes]) -> None:
        """Decode one message and call its handler. Errors are answered."""
        identity, *message = frames
        header: RequestHeader | None = None
        if session is not None and self._produce_service.receive_plain(session, frames):
            session.last_seen_ns = self._now_ns
            self._requests.add(Api.PRODUCE)
            return
        try:
            header = decode_request_header(message[0] if message else b"")
            if len(message) > FRAMES_MAX and len(message) > (
                most := frames_max(header.api, header.version)
            ):
                raise WireError(
                    ErrorCode.MALFORMED_REQUEST,
                    f"the request has {len(message)} frames; the limit is {most}",
                )
            body = message[1:]
            check_body(header.body_length, body)
            api = header.api
            self._requests.add(api)
            if api == Api.HANDSHAKE:
                self._on_handshake(identity, header, body)
                return
            if session is None:
                raise WireError(
                    ErrorCode.SESSION_UNKNOWN,
                    "this connection has no session: send HANDSHAKE first",
                )
            session.last_seen_ns = self._now_ns
            handler = self._handlers.get(api)
            if handler is None:
                raise WireError(ErrorCode.UNKNOWN_API, f"API {api} is unknown")
            low, high = API_VERSIONS[api]
            if not low <= header.version <= high:
                raise WireError(
                    ErrorCode.UNSUPPORTED_VERSION,
                    f"version {header.version} of {Api(api).name} is not supported: use {low} to "
                    f"{high}",
                )
            if self._audit is not None and self._audit.concerns(api, body):
                if self._gate is not None and session.principal is not None:
                    request = json_messages.decode_request(self._one_frame(header, body))
                    self._gate.check(session.principal, api, request, b"")
                self._audit.defer(session, header, body)
                return
            handler(session, header, body)
        except WireError as error:
            if header is None:
                self._refuse_undecodable(identity, session, message, error)
            else:
                self._responses.refuse(
                    identity, session, header.api, header.version, header.correlation_id, error
                )
        except Exception as error:
            api, version, correlation_id = (
                (header.api, header.version, header.correlation_id)
                if header is not None
                else (0, 1, 0)
            )
            if session is not None:
                self._produce_service.forget(session.word, correlation_id)
            self._responses.fail(identity, session, api, version, correlation_id, error)

    def _parks(self, session: Session, frames: list[bytes]) -> bool:
        """Park a message beyond a quota; at the bounds of what is parked it is refused."""
        assert self._quotas is not None
        try:
            is_parked = self._quotas.parks(session, frames)
        except WireError as error:
            try:
                header = decode_request_header(frames[1] if len(frames) > 1 else b"")
            except WireError as malformed:
                self._refuse_undecodable(frames[0], session, frames[1:], malformed)
                return True
            self._responses.refuse(
                frames[0], session, header.api, header.version, header.correlation_id, error
            )
            return True
        if is_parked:
            session.last_seen_ns = self._now_ns
        return is_parked

    def _forget_quotas(self, session: Session) -> None:
        if self._quotas is not None:
            self._quotas.forget_session(session)
        if self._audit is not None:
            self._audit.forget(session)

    def _refuse_undecodable(
        self, identity: bytes, session: Session | None, message: list[bytes], error: WireError
    ) -> None:
        """Refuse a message whose header cannot be decoded.

        A header of the right length is answered with the correlation id at its usual place. Any
        other sender does not speak this protocol and could not match a response to its request. It
        gets an error, and its connection is closed.
        """
        fields = undecodable_request(message[0]) if message else None
        if fields is not None:
            self._responses.refuse(
                identity, session, fields.api, fields.version, fields.correlation_id, error
            )
            return
        self._responses.refuse(identity, session, 0, 1, 0, error)
        self._transport.close_peer(identity, f"it does not speak this protocol: {error.detail}")

    def _one_frame(
        self, header: RequestHeader, body: list[bytes], limit: int = JSON_MAX_BYTES
    ) -> bytes:
        if len(body) != 1:
            raise WireError(
                ErrorCode.MALFORMED_REQUEST,
                f"API {header.api} takes one body frame; the request has {len(body)}",
            )
        if len(body[0]) > limit:
            raise WireError(
                ErrorCode.REQUEST_TOO_LARGE,
                f"the request has {len(body[0])} bytes of JSON; the limit is {limit}: ask for "
                "less at once",
            )
        self._time_slicer.spend(1 + (len(body[0]) >> 9))
        return body[0]

    def _on_handshake(self, identity: bytes, header: RequestHeader, body: list[bytes]) -> None:
        self._session_lifecycle.open(identity, header, self._one_frame(header, body), self._now_ns)

    def _on_ping(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        if body:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "PING takes no body")
        self._responses.send(session, Api.PING, header.version, header.correlation_id, ErrorCode.OK)

    def _on_credit(self, session: Session, _header: RequestHeader, body: list[bytes]) -> None:
        if len(body) != 1:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "CREDIT takes one body frame")
        self._responses.send_credit(
            self._ledger.ask(session.credit, credit_messages.decode_credit(body[0]))
        )

    def _on_decision(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        limit = min(JSON_MAX_BYTES, self._forwarding.payload_max(header))
        frame = self._one_frame(header, body, limit)
        if session.quota is not None and header.api == Api.INIT_TRANSACTIONS:
            assert self._quotas is not None
            self._quotas.check_transactions(session, frame)
        self._forwarding.ask(session, header, frame)

    def _on_describe_quotas(
        self, session: Session, header: RequestHeader, body: list[bytes]
    ) -> None:
        json_messages.decode_request(self._one_frame(header, body))
        found = {"rules": [], "usage": []} if self._quotas is None else self._quotas.describe()
        self._responses.send(
            session, header.api, header.version, header.correlation_id, ErrorCode.OK,
            [json_messages.encode_json(found)],
        )  # fmt: skip

    def _on_unreachable(self, session: Session) -> None:
        """Drop the session of a client that cannot receive its response."""
        self._session_lifecycle.drop(session)

    # ---- look-ups --------------------------------------------------------------------------------

    def _on_metadata(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        self._submit_lookup(self._metadata_service.metadata, session, header, body)

    def _on_list_offsets(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        self._submit_lookup(self._metadata_service.list_offsets, session, header, body)

    def _submit_lookup(
        self, lookup: Lookup, session: Session, header: RequestHeader, body: list[bytes]
    ) -> None:
        """Begin a task that sends its own response, at once or in time slices."""
        frame = self._one_frame(header, body)
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

    # ---- fetch -----------------------------------------------------------------------------------

    def _on_fetch(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        if len(body) != 1:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "FETCH takes one body frame")
        request = fetch_messages.decode_fetch(body[0], header.version)
        session.fetch_received = min(request.received_bytes, session.fetch_sent)
        self._fetches.begin(
            Fetch(session, header.version, header.correlation_id, request), self._now_ns
        )
        if self._audit is not None and self._audit.watches_data:
            read = {entry.topic_id for entry in request.entries}
            refuses = self._routing.refuses_read
            self._audit.accessed(
                session, "read", [one for one in read if not refuses(session.principal, one)]
            )

    def _respond_fetch(self, fetch: Fetch, entries: list[FetchedEntry], data: memoryview) -> None:
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

    def _refuse_fetch(self, fetch: Fetch, error: Exception) -> None:
        self._responses.refuse_or_fail(
            fetch.session, Api.FETCH, fetch.version, fetch.correlation_id, error
        )


def build(
    context: ProcessContext,
    transport: Transport,
    files: FileReader,
    pool: AsyncReader,
    generation: int,
    gate: Gate | None = None,
) -> Front:
    """Build the front of this process and request its feed from the controller.

    `generation` is a number that no earlier front of this address had.
    """
    spec, settings = context.spec, context.spec.settings

    def connect(worker: int) -> WorkerLink:
        ring = Ring(context.attach(f"ring-{worker}", RegionKind.RING))
        lane = context.lane_writer(process_name(Role.WORKER, worker))
        return WorkerLink(
            lane, context.bell(Role.WORKER, worker), ring, AckWalker(ring, spec.index, generation)
        )

    def forwarder(role: Role) -> ForwarderLink:
        name, process = process_name(role, 0), context.control.process(role, 0)
        return ForwarderLink(
            context.lane_writer(name),
            context.lane_reader(name),
            context.bell(role, 0),
            lambda: process.load(ProcessWord.GENERATION),
        )

    groups = context.control.process(Role.GROUPS, 0)

    def connect_groups() -> ForwarderLink | None:
        return forwarder(Role.GROUPS) if groups.load(ProcessWord.GENERATION) else None

    def ask_for_groups() -> None:
        if not context.slot.load(ProcessWord.GROUPS_REQUESTED):
            context.slot.store(ProcessWord.GROUPS_REQUESTED, 1)
            context.bell(Role.SUPERVISOR, 0).ring()

    scheduler = context.control.process(Role.SCHEDULER, 0)
    controller_slot = context.control.process(Role.CONTROLLER, 0)

    def connect_scheduler() -> ForwarderLink | None:
        return forwarder(Role.SCHEDULER) if scheduler.load(ProcessWord.GENERATION) else None

    def ask_for_scheduler() -> None:
        if not context.slot.load(ProcessWord.SCHEDULER_REQUESTED):
            context.slot.store(ProcessWord.SCHEDULER_REQUESTED, 1)
            context.bell(Role.SUPERVISOR, 0).ring()

    controller = forwarder(Role.CONTROLLER)
    lane_half = int(settings["lane_bytes"]) // 2
    reader = LogReader(
        files,
        spec.data_dirs,
        [context.table(d) for d in range(len(spec.data_dirs))],
        open_files_max(),
    )
    front = Front(
        transport=transport,
        generation=generation,
        process_generation=spec.generation,
        workers={w: connect(w) for w in range(int(settings["workers"]))},
        connect_worker=connect,
        controller=controller,
        scheduler=OnDemand(
            connect_scheduler,
            ask_for_scheduler,
            lambda: False,
            controller.to_it.payload_max,
            lambda: bool(controller_slot.load(ProcessWord.SCHEDULER_REQUESTED)),
        ),
        groups=OnDemand(
            connect_groups,
            ask_for_groups,
            lambda: bool(groups.load(ProcessWord.WITHOUT_MEMORY)),
            controller.to_it.payload_max,
        ),
        front_ports=lambda: [
            context.control.port(f).load()
            for f in range(int(settings["fronts"]) - int(settings.get("gateways", 0)))
        ],
        routing=PartitionRoutes(),
        gate=gate,
        reader=reader,
        close_removed=reader.files.close_removed,
        pool=pool,
        ledger=CreditLedger(credit_budget(settings), 4 * lane_half, lane_half),
        slot=context.slot,
        cluster_id=spec.instance,
        auto_create_topics=bool(settings["auto_create_topics"]),
        fronts=int(settings["fronts"]),
        quotas=settings["quotas"],
        audit=settings.get("audit"),
        on_ready=context.report_ready,
        start_ns=context.clock.monotonic_ns(),
        clock=context.clock,
    )
    context.ask_for_feed()
    return front


def make_gate(context: ProcessContext) -> tuple[str, Gate]:
    """The secret key and the gate of an appliance that has users. The process ends without its
    keys.
    """
    from netfront.access.gate import Gate
    from netfront.access.page_tokens import PageTokens
    from shm.rights.server_keys import KeysUnusableError, own_public_key, read_server_key

    data_dir = context.spec.data_dirs[0]
    try:
        gate = Gate(own_public_key(data_dir), context.clock.wall_us)
        secret = read_server_key(data_dir).secret
        gate.tokens = PageTokens(secret.encode())
        return secret, gate
    except KeysUnusableError as error:
        print(f"tailrace: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_FAILED)


def main() -> None:
    """Run the front process."""
    context = start()
    configure_logging(context)
    keep_freed_memory()
    spec = context.spec
    # A predecessor that listened on any free port has announced its port to clients. Keep it.
    port = context.control.port(spec.index).load()
    addresses = [front_address(address, spec.index, port) for address in spec.settings["listen"]]
    security, gate = None, None
    if spec.settings.get("security"):
        secret, gate = make_gate(context)
        security = Security(secret, gate.allows)
    given = ListeningSockets(
        SocketAccess(*spec.settings["ipc.access"]), spec.settings["listen.sockets"]
    )
    own_descriptors = open_descriptor_count()
    try:
        router = Router(
            addresses,
            message_max_bytes(spec.settings),
            limits(spec.settings, own_descriptors),
            given,
            security=security,
        )
    except AddressInUseError as error:
        print(f"tailrace: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_ADDRESS_IN_USE)
    context.control.port(spec.index).store(router.port)
    generation = int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF | 1
    if gate is not None:
        assert router.zap is not None
        gate.answer_connections = router.zap.step
    front = build(
        context, router, DiskFileReader(), ReaderPool(context.doorbell.ring), generation, gate
    )

    router.on_rebound = front.end_session_of

    def wait(timeout_ms: float | None, busy_ns: int) -> None:
        if front.accepts_input:
            router.wait(context.doorbell, timeout_ms, busy_ns)
        else:
            context.doorbell.wait(timeout_ms)

    def apply(settings: dict[str, Any]) -> None:
        front.apply_settings(settings)
        router.set_limits(limits(settings, own_descriptors))

    run(front, context, wait, apply)
    router.close()


if __name__ == "__main__":
    main()
