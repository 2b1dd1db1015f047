"""The front: owns the socket of one address, takes requests apart and hands each to the part that serves it.

Batches go to workers (`produces`), fetches to `fetches`, look-ups to `lookups`, what another process decides to `decisions`; sessions begin and end in
`session_keeper`; what is sent goes through `replies`.

Owner: its ZeroMQ socket, sessions and credits; in shared memory the tails of its lanes and its cursor in each ring.
Invariants: a request is answered once (acks=0: never); whatever comes in, the front lives: what does not parse is answered with a code and forgotten, or
    its connection is closed; a connection's batches reach their worker in the order in which they came.
Crash: nothing of it survives, nothing needs to: clients see another generation, connect anew and send again what was not acknowledged; workers recognise
    what they have.

Run as `python -P -m netfront.front`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator

from netfront.acks import AckWalker
from netfront.credits import CreditLedger
from netfront.deciders import DeciderLink, OnDemand
from netfront.decisions import DECIDED_APIS, Decisions
from netfront.fetches import FetchService
from netfront.front_limits import limits, message_max_bytes, open_files_max
from netfront.log_files import DiskLogFiles, LogFiles
from netfront.log_reader import LogReader
from netfront.lookups import Lookups
from netfront.parked import Fetch
from netfront.peer_sockets import keep_freed_memory
from netfront.produces import Produces, WorkerLink
from netfront.reader_pool import ReadAhead, ReaderPool
from netfront.replies import Replies
from netfront.router import AddressInUseError, Router
from netfront.routing import Routing
from netfront.session_keeper import SessionKeeper
from netfront.sessions import Session, Sessions
from netfront.slices import Slices, Task
from netfront.transport import Transport
from shm.catalog_messages import Assignment
from shm.control import ProcessSlot
from shm.layout import ProcessWord, RegionKind, Role
from shm.ring import Ring
from shm.runtime.boundary import Boundary
from shm.runtime.process import EXIT_ADDRESS_IN_USE, ProcessContext, configure_logging, process_name, run, start
from shm.settled_news import SettledInterest
from tailrace.front_addresses import front_address
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.requests import FetchedEntry
from tailrace.protocol.wire import (
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
from workers.timing_wheel import NEVER_NS, TimingWheel

logger = logging.getLogger(__name__)

RECEIVE_LIMIT = 256
"""Messages taken from the socket before everything else has its turn."""
UNREAD_ANSWERS_MAX_BYTES = 8 << 20
"""A client that has not taken in so many bytes of answers gets no more of METADATA and LIST_OFFSETS."""
SWEEP_NS = 100_000_000
"""While producers wait for credit: how long others may leave theirs unused."""
Lookup = Callable[[bytes, Callable[[bytes], None]], Iterator[int]]


class Front:
    """An agent (see `shm.runtime.process`)."""

    def __init__(
        self,
        *,
        transport: Transport,
        generation: int,
        process_generation: int,
        workers: dict[int, WorkerLink],
        connect_worker: Callable[[int], WorkerLink],
        coordinator: DeciderLink,
        scheduler: DeciderLink,
        groups: OnDemand,
        front_ports: Callable[[], list[int]],
        routing: Routing,
        reader: LogReader,
        pool: ReadAhead,
        ledger: CreditLedger,
        slot: ProcessSlot,
        cluster_id: str,
        auto_create_topics: bool,
        on_ready: Callable[[], None],
        start_ns: int,
    ) -> None:
        self._transport = transport
        self._routing = routing
        self._reader = reader
        self._ledger = ledger
        self._slot = slot
        self._boundary = Boundary(slot)
        self._on_ready = on_ready
        self._is_fed = False
        self._is_stopping = False
        self._sweep_at_ns = 0
        self._now_ns = start_ns
        self._settled = SettledInterest(slot.cell(ProcessWord.SETTLED_UNWANTED))
        self._sessions = Sessions(generation)
        self._slices = Slices()
        self._lookups = Lookups(routing, reader, front_ports)
        self._replies = Replies(transport, self._sessions, slot, self._boundary, self._on_unreachable)
        self._fetch_wheel: TimingWheel[Fetch] = TimingWheel(start_ns)
        self._fetches = FetchService(
            reader=reader, routing=routing, pool=pool, wheel=self._fetch_wheel, outgoing=transport, slices=self._slices, respond=self._respond_fetch,
            refuse=self._refuse_fetch,
        )  # fmt: skip
        self._produces = Produces(
            workers=workers, connect_worker=connect_worker, routing=routing, ledger=ledger, sessions=self._sessions, replies=self._replies,
            on_settled=self._fetches.on_settled, start_ns=start_ns,
        )  # fmt: skip
        self._decisions = Decisions(
            coordinator=coordinator, scheduler=scheduler, groups=groups, process_generation=process_generation, sessions=self._sessions, replies=self._replies,
            on_assignment=self._on_assignment, on_fed=self._on_fed, start_ns=start_ns,
        )  # fmt: skip
        self._keeper = SessionKeeper(
            transport=transport, sessions=self._sessions, ledger=ledger, replies=self._replies, slot=slot, boundary=self._boundary,
            described={"cluster_id": cluster_id, "server": "tailrace", "auto_create_topics": auto_create_topics},
            forget=[
                self._fetches.forget_session, self._slices.forget_session, self._produces.forget_session, self._decisions.forget_session,
            ],
            start_ns=start_ns,
        )  # fmt: skip
        self._handlers: dict[int, Callable[[Session, RequestHeader, list[bytes]], None]] = {
            Api.PING: self._on_ping,
            Api.PRODUCE: self._produces.take,
            Api.FETCH: self._on_fetch,
            Api.METADATA: self._on_metadata,
            Api.LIST_OFFSETS: self._on_list_offsets,
            Api.CREDIT: self._on_credit,
            **dict.fromkeys(DECIDED_APIS, self._on_decision),
        }

    @property
    def takes_input(self) -> bool:
        """Whether what comes from the network is read now: not before the catalog is known, not while stopping."""
        return self._is_fed and not self._is_stopping

    # ---- agent -----------------------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        """One turn of the loop; returns how much was done."""
        self._now_ns = self._produces.now_ns = self._decisions.now_ns = now_ns
        work = self._decisions.step()
        if self._fetches.has_more:
            work += self._fetches.look_at_moved()
        received = self._receive() if self.takes_input else 0
        work += received + self._produces.pass_on() + self._decisions.pass_on()
        work += self._produces.walk_rings()
        work += self._fetches.on_reads_completed(now_ns)
        if now_ns >= self._fetch_wheel.quiet_until_ns:
            work += self._fetches.on_timeouts(now_ns)
        if now_ns >= self._fetches.next_deadline_ns():
            work += self._fetches.on_drained(now_ns)
        if now_ns >= self._produces.next_deadline_ns():
            work += self._produces.answer_late(now_ns)
        work += self._slices.step()
        if now_ns >= self._keeper.next_deadline_ns():
            work += (
                self._keeper.step(now_ns) + self._decisions.pass_on()
            )  # that a session has ended is told now: nothing may wake this loop again
        if self._ledger.is_contended and now_ns >= self._sweep_at_ns:
            self._sweep_at_ns = now_ns + SWEEP_NS
            if received < RECEIVE_LIMIT:  # else what a client has used may not have been read yet
                self._replies.tell_credit(self._ledger.sweep())
        if self._settled.show(self._produces.has_unanswered() or self._fetches.are_parked) and self._produces.has_more():
            work += 1
        return work

    def has_more(self) -> bool:
        """Whether the next step has something to do at once."""
        return bool(len(self._slices)) or self._fetches.has_more or self._produces.has_more()

    def next_deadline_ns(self) -> int | None:
        """When the next step has something to do, without a message; None: never."""
        deadline_ns = min(
            self._fetch_wheel.quiet_until_ns, self._fetches.next_deadline_ns(), self._produces.next_deadline_ns(), self._decisions.next_deadline_ns(),
            self._keeper.next_deadline_ns(), self._sweep_at_ns if self._ledger.is_contended else NEVER_NS,
        )  # fmt: skip
        return deadline_ns if deadline_ns < NEVER_NS else None

    def begin_stop(self) -> None:
        """Read nothing more; what was read is passed on and answered."""
        self._is_stopping = True
        self._fetches.answer_all()

    def is_finished(self) -> bool:
        """Whether everything that was read has been passed on and answered."""
        return not len(self._slices) and self._produces.is_finished()

    # ---- the coordinator's news ------------------------------------------------------------------------------------------------------

    def _on_fed(self) -> None:
        if not self._is_fed:
            self._is_fed = True
            self._on_ready()

    def _on_assignment(self, payload: bytes) -> None:
        try:
            assignment = Assignment.decode(payload)
        except Exception as error:
            self._boundary.caught("message=assignment", error)
            return
        if not assignment.dropped:
            self._produces.reach(assignment.worker)
        try:
            if assignment.dropped:
                self._reader.forget(assignment)
            self._routing.apply(assignment)
            if assignment.dropped:
                self._fetches.on_dropped(assignment)
        except Exception as error:
            self._boundary.caught(f"message=assignment topic={assignment.topic} partition={assignment.partition}", error)

    # ---- requests --------------------------------------------------------------------------------------------------------------------

    def _receive(self) -> int:
        count = 0
        while count < RECEIVE_LIMIT and not self._slices.is_spent and (frames := self._transport.try_receive()) is not None:
            count += 1
            self._handle(frames)
        return count

    def _handle(self, frames: list[bytes]) -> None:
        """One message: header, session, handler. Whatever is wrong with it is answered."""
        identity, *message = frames
        header: RequestHeader | None = None
        session = self._sessions.by_identity(identity)
        if session is not None and self._produces.take_plain(session, frames):
            session.last_seen_ns = self._now_ns
            return
        try:
            header = decode_request_header(message[0] if message else b"")
            if len(message) > FRAMES_MAX and len(message) > (most := frames_max(header.api, header.version)):
                raise WireError(ErrorCode.MALFORMED_REQUEST, f"{len(message)} frames; this request has 1 to {most}")
            body = message[1:]
            check_body(header.body_length, body)
            api = header.api
            if api == Api.HANDSHAKE:
                self._on_handshake(identity, header, body)
                return
            if session is None:
                raise WireError(ErrorCode.SESSION_UNKNOWN, "make a handshake first")
            session.last_seen_ns = self._now_ns
            handler = self._handlers.get(api)
            if handler is None:
                raise WireError(ErrorCode.UNKNOWN_API, f"API {api} is unknown")
            low, high = API_VERSIONS[api]
            if not low <= header.version <= high:
                raise WireError(
                    ErrorCode.UNSUPPORTED_VERSION, f"version {header.version} of {Api(api).name}; this front speaks {low} to {high}"
                )
            handler(session, header, body)
        except WireError as error:
            if header is None:
                self._refuse_undecodable(identity, session, message, error)
            else:
                self._replies.refuse(identity, session, header.api, header.version, header.correlation_id, error)
        except Exception as error:
            api, version, correlation_id = (header.api, header.version, header.correlation_id) if header is not None else (0, 1, 0)
            if session is not None:
                self._produces.forget(session.word, correlation_id)
            self._replies.fail(identity, session, api, version, correlation_id, error)

    def _refuse_undecodable(self, identity: bytes, session: Session | None, message: list[bytes], error: WireError) -> None:
        """A header of the right length is answered by what stands where the fields are. What sends another does not speak this protocol, and would wait
        for ever for an answer that it can tell from a push: it is told, and its connection ends.
        """
        fields = undecodable_request(message[0]) if message else None
        if fields is not None:
            self._replies.refuse(identity, session, fields.api, fields.version, fields.correlation_id, error)
            return
        self._replies.refuse(identity, session, 0, 1, 0, error)
        self._transport.close_peer(identity, f"it does not speak this protocol: {error.detail}")

    def _one_frame(self, header: RequestHeader, body: list[bytes], limit: int = JSON_MAX_BYTES) -> bytes:
        if len(body) != 1:
            raise WireError(ErrorCode.MALFORMED_REQUEST, f"API {header.api} takes one body frame, {len(body)} came")
        if len(body[0]) > limit:
            raise WireError(ErrorCode.REQUEST_TOO_LARGE, f"{len(body[0])} bytes of JSON; {limit} are allowed: ask for less at once")
        self._slices.spend(1 + (len(body[0]) >> 9))
        return body[0]

    def _on_handshake(self, identity: bytes, header: RequestHeader, body: list[bytes]) -> None:
        self._keeper.open(identity, header, self._one_frame(header, body), self._now_ns)

    def _on_ping(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        if body:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "PING takes no body")
        self._replies.send(session, Api.PING, header.version, header.correlation_id, ErrorCode.OK)

    def _on_credit(self, session: Session, _header: RequestHeader, body: list[bytes]) -> None:
        if len(body) != 1:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "CREDIT takes one body frame")
        self._replies.tell_credit(self._ledger.ask(session.credit, requests.decode_credit(body[0])))

    def _on_decision(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        limit = min(JSON_MAX_BYTES, self._decisions.payload_max(header))
        self._decisions.ask(session, header, self._one_frame(header, body, limit))

    def _on_unreachable(self, session: Session) -> None:
        """A client that does not get its answer loses its session."""
        self._keeper.drop(session)

    # ---- look-ups --------------------------------------------------------------------------------------------------------------------

    def _on_metadata(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        self._look_up(self._lookups.metadata, session, header, body)

    def _on_list_offsets(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        self._look_up(self._lookups.list_offsets, session, header, body)

    def _look_up(self, lookup: Lookup, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Begin a task that answers by itself, now or in slices."""
        frame = self._one_frame(header, body)
        api, version, correlation_id = header.api, header.version, header.correlation_id

        def answer(found: bytes) -> None:
            unsent = self._transport.unsent_bytes(session.identity)
            if unsent >= UNREAD_ANSWERS_MAX_BYTES:
                raise WireError(ErrorCode.TOO_MANY_REQUESTS, f"{unsent} bytes of answers wait to be read by this client; read them first")
            self._replies.send(session, api, version, correlation_id, ErrorCode.OK, [found])

        def on_error(error: Exception) -> None:
            self._replies.refuse_or_fail(session, api, version, correlation_id, error)

        self._slices.begin(Task(session, len(frame), lambda: lookup(frame, answer), on_error), try_now=True)

    # ---- fetch -----------------------------------------------------------------------------------------------------------------------

    def _on_fetch(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        if len(body) != 1:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "FETCH takes one body frame")
        request = requests.decode_fetch(body[0])
        session.fetch_received = min(request.received_bytes, session.fetch_sent)
        self._fetches.begin(Fetch(session, header.version, header.correlation_id, request), self._now_ns)

    def _respond_fetch(self, fetch: Fetch, entries: list[FetchedEntry], data: memoryview) -> None:
        listed = requests.encode_fetched(entries)
        self._slot.store(ProcessWord.BYTES_COUNT, self._slot.load(ProcessWord.BYTES_COUNT) + len(listed) + len(data))
        self._replies.send_batches(fetch.session, Api.FETCH, fetch.version, fetch.correlation_id, listed, data)

    def _refuse_fetch(self, fetch: Fetch, error: Exception) -> None:
        self._replies.refuse_or_fail(fetch.session, Api.FETCH, fetch.version, fetch.correlation_id, error)


def build(context: ProcessContext, transport: Transport, files: LogFiles, pool: ReadAhead, generation: int) -> Front:
    """The front of this specification; it has asked to be fed. `generation`: a number that no front of this address had before."""
    spec, settings = context.spec, context.spec.settings

    def connect(worker: int) -> WorkerLink:
        ring = Ring(context.attach(f"ring-{worker}", RegionKind.RING))
        lane = context.lane_writer(process_name(Role.WORKER, worker))
        return WorkerLink(lane, context.bell(Role.WORKER, worker), ring, AckWalker(ring, spec.index, generation))

    def decider(role: Role) -> DeciderLink:
        name, process = process_name(role, 0), context.control.process(role, 0)
        return DeciderLink(
            context.lane_writer(name), context.lane_reader(name), context.bell(role, 0), lambda: process.load(ProcessWord.GENERATION)
        )

    groups = context.control.process(Role.GROUPS, 0)

    def connect_groups() -> DeciderLink | None:
        return decider(Role.GROUPS) if groups.load(ProcessWord.GENERATION) else None

    def ask_for_groups() -> None:
        if not context.slot.load(ProcessWord.WANTS_GROUPS):
            context.slot.store(ProcessWord.WANTS_GROUPS, 1)
            context.bell(Role.SUPERVISOR, 0).ring()

    coordinator = decider(Role.COORDINATOR)
    lane_half = int(settings["lane_bytes"]) // 2
    front = Front(
        transport=transport,
        generation=generation,
        process_generation=spec.generation,
        workers={w: connect(w) for w in range(int(settings["workers"]))},
        connect_worker=connect,
        coordinator=coordinator,
        scheduler=decider(Role.SCHEDULER),
        groups=OnDemand(
            connect_groups, ask_for_groups, lambda: bool(groups.load(ProcessWord.WITHOUT_MEMORY)), coordinator.to_it.payload_max
        ),
        front_ports=lambda: [context.control.port(f).load() for f in range(int(settings["fronts"]))],
        routing=Routing(),
        reader=LogReader(files, spec.data_dirs, [context.table(d) for d in range(len(spec.data_dirs))], open_files_max()),
        pool=pool,
        ledger=CreditLedger(int(settings["credit_bytes"]), 4 * lane_half, lane_half),
        slot=context.slot,
        cluster_id=spec.instance,
        auto_create_topics=bool(settings["auto_create_topics"]),
        on_ready=context.report_ready,
        start_ns=context.clock.monotonic_ns(),
    )
    context.ask_for_feed()
    return front


def main() -> None:
    """The process."""
    context = start()
    configure_logging(context)
    keep_freed_memory()
    spec = context.spec
    # A predecessor that was given any free port has told clients which: go on there.
    port = context.control.port(spec.index).load()
    addresses = [front_address(address, spec.index, port) for address in spec.settings["listen"]]
    try:
        router = Router(addresses, message_max_bytes(spec.settings), limits(spec.settings))
    except AddressInUseError as error:
        print(f"tailrace: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_ADDRESS_IN_USE)
    context.control.port(spec.index).store(router.port)
    generation = int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF | 1
    front = build(context, router, DiskLogFiles(), ReaderPool(context.doorbell.ring), generation)

    def wait(timeout_ms: float | None, busy_ns: int) -> None:
        if front.takes_input:
            router.wait(context.doorbell, timeout_ms, busy_ns)
        else:
            context.doorbell.wait(timeout_ms)

    run(front, context, wait)
    router.close()


if __name__ == "__main__":
    main()
