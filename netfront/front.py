"""The front: owns the socket of one address, passes batches to workers, answers, serves fetches.

Owner: its ZeroMQ socket, sessions and credits; in shared memory the tails of its lanes and its cursor in each ring.
Invariants: a request is answered once (acks=0: never); whatever comes in, the front lives: what does not parse is answered with a code
and forgotten;
    a connection's batches reach their worker in the order they came.
Crash: nothing of it survives, nothing needs to: clients see another generation, connect anew and send again what was not acknowledged;
workers
    recognise what they have.

Run as `python -P -m netfront.front`.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from netfront.acks import AckWalker, Answer
from netfront.credits import Credit, CreditLedger
from netfront.deciders import Decider, DeciderLink
from netfront.endings import Endings
from netfront.fetches import FetchService
from netfront.log_files import DiskLogFiles, LogFiles
from netfront.log_reader import LogReader
from netfront.lookups import Lookups
from netfront.parked import Fetch
from netfront.peers import Limits
from netfront.reader_pool import ReadAhead, ReaderPool
from netfront.router import AddressInUseError, Router, Watched
from netfront.routing import Routing
from netfront.sessions import Session, Sessions
from netfront.slices import Slices, Task
from netfront.unanswered import Unanswered
from shm.assignments import Assignment, LaneKind
from shm.boundary import Boundary
from shm.control import ProcessSlot
from shm.doorbell import Doorbell
from shm.lane import LaneWriter
from shm.layout import ACKS_ALL, ACKS_LEADER, ACKS_NONE, ProcessWord, RegionKind, Role
from shm.process import EXIT_ADDRESS_IN_USE, ProcessContext, configure_logging, process_name, run, start
from shm.ring import Ring
from tailrace.batch_header import HEADER_BYTES
from tailrace.checksum import Readable
from tailrace.front_addresses import front_address
from tailrace.protocol import requests
from tailrace.protocol.errors import ERROR_TABLE, ErrorCode, code_of
from tailrace.protocol.requests import FetchedEntry
from tailrace.protocol.wire import (
    API_VERSIONS,
    FRAMES_MAX,
    JSON_MAX_BYTES,
    PUSH_CORRELATION_ID,
    Api,
    RequestHeader,
    WireError,
    check_body,
    decode_request_header,
    encode_response,
)
from workers.timing_wheel import NEVER_NS, TimingWheel

logger = logging.getLogger(__name__)

RECEIVE_LIMIT = 256
"""Messages taken from the socket before everything else has its turn."""
SESSION_IDLE_NS = 600_000_000_000
CREDIT_IDLE_NS = 60_000_000_000
DECISION_TIMEOUT_MS = 35_000
"""The coordinator answers within 30 s, unless it was killed."""
DELAYS_TIMEOUT_MS = 15_000
SESSION_PRODUCES_MAX = 32_768
PRODUCES_MAX = 131_072
"""Batches that wait for their answer, of one connection and of all: five under way to each of 4,096 partitions are 20,480."""
UNREAD_ANSWERS_MAX_BYTES = 8 << 20
"""A client that has not taken in so many bytes of answers gets no more of METADATA and LIST_OFFSETS."""
OVERDRAFT_BYTES = 1 << 20
SWEEP_NS = 100_000_000
"""While producers wait for credit: how long others may leave theirs unused."""
OPEN_FILES_MAX = 512
DESCRIPTORS_RESERVED = 16
UNSENT_MAX_BYTES = 128 << 20
"""Of answers that libzmq holds for all clients together; `credit_bytes` when that is more."""
UNSHAKEN_MAX_BYTES = 16 << 20
MEMORY_SLACK_BYTES = 128 << 20
"""Beside batches and answers: sessions, buffers that are free, and what lies between two looks."""
Lookup = Callable[[bytes, Callable[[bytes], None]], Iterator[int]]
_ACKS = {0: ACKS_NONE, 1: ACKS_LEADER, requests.ACKS_ALL: ACKS_ALL}


class Transport(Protocol):
    """What a front needs of its socket (see `router.Router`)."""

    def try_receive(self) -> list[bytes] | None: ...
    def try_send(self, identity: bytes, frames: Sequence[Readable]) -> bool: ...
    def try_send_buffer(self, identity: bytes, frames: Sequence[Readable], data: memoryview) -> bool: ...
    def new_buffer(self, size: int) -> bytearray: ...
    def unsent_bytes(self, identity: bytes) -> int: ...
    def unsent_total(self) -> int: ...
    def shaken(self, identity: bytes, credit: Credit | None) -> None: ...
    def watch(self, now_ns: int) -> Watched: ...

    @property
    def watch_at_ns(self) -> int: ...


class Waiting(NamedTuple):
    """A batch that does not fit its lane yet."""

    slot: int
    flags: int
    session: Session
    correlation_id: int
    arrival_ns: int
    batch: bytes


@dataclass(slots=True)
class WorkerLink:
    """The way to one worker."""

    lane: LaneWriter
    bell: Doorbell
    ring: Ring
    acks: AckWalker
    waiting: deque[Waiting]


class Front:
    """An agent (see `shm.process`)."""

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
        self._generation = generation
        self._process_generation = process_generation
        self._workers = workers
        self._connect_worker = connect_worker
        self._coordinator = Decider(coordinator, DECISION_TIMEOUT_MS, self._answer_instead, start_ns)
        self._scheduler = Decider(scheduler, DELAYS_TIMEOUT_MS, self._answer_instead, start_ns)
        self._routing = routing
        self._reader = reader
        self._ledger = ledger
        self._slot = slot
        self._boundary = Boundary(slot)
        self._cluster_id = cluster_id
        self._auto_create_topics = auto_create_topics
        self._on_ready = on_ready
        self._sessions = Sessions(generation)
        self._fetch_wheel: TimingWheel[Fetch] = TimingWheel(start_ns)
        self._slices = Slices()
        self._lookups = Lookups(routing, reader, front_ports)
        self._fetches = FetchService(
            reader=reader, routing=routing, pool=pool, wheel=self._fetch_wheel, outgoing=transport, slices=self._slices, respond=self._respond_fetch,
            refuse=self._refuse_fetch,
        )  # fmt: skip
        self._unanswered = Unanswered(start_ns, SESSION_PRODUCES_MAX, PRODUCES_MAX)
        """Batches that a worker has."""
        self._fed = False
        self._stopping = False
        self._silences: TimingWheel[Session] = TimingWheel(start_ns, tick_ns=1_000_000_000)
        """When to look whether a session has been silent."""
        self._endings = Endings()
        self._sweep_at_ns = 0
        self._now_ns = start_ns
        self._handlers: dict[int, Callable[[Session, RequestHeader, list[bytes]], None]] = {
            Api.PING: self._on_ping,
            Api.PRODUCE: self._on_produce,
            Api.FETCH: self._on_fetch,
            Api.METADATA: self._on_metadata,
            Api.LIST_OFFSETS: self._on_list_offsets,
            Api.CREDIT: self._on_credit,
            Api.CREATE_TOPICS: self._on_decision,
            Api.DELETE_TOPICS: self._on_decision,
            Api.ALTER_TOPICS: self._on_decision,
            Api.DELETE_RECORDS: self._on_decision,
            Api.LEASE_OFFSETS: self._on_decision,
            Api.INIT_PRODUCER_ID: self._on_decision,
            Api.DESCRIBE_CLUSTER: self._on_decision,
            Api.LIST_DELAYS: self._on_delays,
            Api.CHANGE_DELAYS: self._on_delays,
            Api.DESCRIBE_DELAYS: self._on_delays,
        }

    @property
    def takes_input(self) -> bool:
        """Whether what comes from the network is read now: not before the catalog is known, not while stopping."""
        return self._fed and not self._stopping

    # ---- agent -----------------------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        self._now_ns = now_ns
        work = self._read_coordinator() + self._read_scheduler()
        if self._fetches.has_more:
            work += self._fetches.look_at_moved()
        received = self._receive() if self.takes_input else 0
        work += received + self._pass_on()
        work += self._walk_rings()
        work += self._fetches.on_reads_completed(now_ns)
        if now_ns >= self._fetch_wheel.quiet_until_ns:
            work += self._fetches.on_timeouts(now_ns)
        if now_ns >= self._fetches.next_deadline_ns():
            work += self._fetches.on_drained(now_ns)
        if now_ns >= self._unanswered.timeouts.quiet_until_ns:
            work += self._answer_late(now_ns)
        work += self._slices.step()
        if now_ns >= self._silences.quiet_until_ns:
            self._look_at_silent_sessions(now_ns)
        if now_ns >= self._transport.watch_at_ns:
            work += self._watch(now_ns)
        if now_ns >= self._endings.look_at_ns:
            self._end_sessions(now_ns)
        if self._ledger.is_contended and now_ns >= self._sweep_at_ns:
            self._sweep_at_ns = now_ns + SWEEP_NS
            if received < RECEIVE_LIMIT:  # else what somebody has used may not have been read yet
                self._tell_credit(self._ledger.sweep())
        return work

    def has_more(self) -> bool:
        return bool(len(self._slices)) or self._fetches.has_more or any(link.acks.has_more() for link in self._workers.values())

    def next_deadline_ns(self) -> int | None:
        deadline_ns = min(
            self._fetch_wheel.quiet_until_ns, self._fetches.next_deadline_ns(), self._unanswered.timeouts.quiet_until_ns,
            self._coordinator.next_deadline_ns(), self._scheduler.next_deadline_ns(), self._silences.quiet_until_ns,
            self._transport.watch_at_ns, self._endings.look_at_ns, self._sweep_at_ns if self._ledger.is_contended else NEVER_NS,
        )  # fmt: skip
        return deadline_ns if deadline_ns < NEVER_NS else None

    def begin_stop(self) -> None:
        """Read nothing more; what was read is passed on and answered."""
        self._stopping = True
        self._fetches.answer_all()

    def is_finished(self) -> bool:
        return not len(self._slices) and all(
            not link.waiting and link.lane.is_empty() and link.acks.is_caught_up() for link in self._workers.values()
        )

    # ---- coordinator and scheduler ---------------------------------------------------------------------------------------------------

    def _read_coordinator(self) -> int:
        count = self._coordinator.step(self._now_ns)
        lane = self._coordinator.link.from_it
        while (message := lane.peek()) is not None:
            count += 1
            kind, code, word, correlation_id = message.kind, message.flags, message.session, message.correlation_id
            payload = bytes(message.payload)
            lane.advance(message)
            lane.consume()
            if kind == LaneKind.ASSIGN:
                self._on_assignment(payload)
            elif kind == LaneKind.FED and correlation_id == self._process_generation and not self._fed:
                self._fed = True
                self._on_ready()
            elif kind == LaneKind.RESPONSE:
                self._pass_back(self._coordinator, word, correlation_id, code, payload)
        return count

    def _on_assignment(self, payload: bytes) -> None:
        try:
            assignment = Assignment.decode(payload)
        except Exception as error:
            self._boundary.caught("message=assignment", error)
            return
        if not assignment.dropped and assignment.worker not in self._workers:  # a dedicated one, started since
            self._workers[assignment.worker] = self._connect_worker(assignment.worker)
        try:
            if assignment.dropped:
                self._reader.forget(assignment)
            self._routing.apply(assignment)
            if assignment.dropped:
                self._fetches.on_dropped(assignment)
        except Exception as error:
            self._boundary.caught(f"message=assignment topic={assignment.topic} partition={assignment.partition}", error)

    def _read_scheduler(self) -> int:
        count = self._scheduler.step(self._now_ns)
        lane = self._scheduler.link.from_it
        while (message := lane.peek()) is not None:
            count += 1
            code, word, correlation_id, payload = message.flags, message.session, message.correlation_id, bytes(message.payload)
            lane.advance(message)
            lane.consume()
            self._pass_back(self._scheduler, word, correlation_id, code, payload)
        return count

    def _pass_back(self, decider: Decider, word: int, correlation_id: int, code: int, payload: bytes) -> None:
        """An answer of the coordinator or the scheduler, to whoever asked."""
        api = decider.take(word, correlation_id)
        session = self._sessions.by_word(word)
        if session is None or not api:
            return
        try:
            self._send(session, api, 1, correlation_id, code_of(code), [payload])
        except Exception as error:
            self._fail(session.identity, session, api, correlation_id, error)

    def _answer_instead(self, word: int, api: int, correlation_id: int, code: ErrorCode, sentence: str) -> None:
        """Answer a request that nothing else will."""
        session = self._sessions.by_word(word)
        if session is None:
            return
        try:
            self._send(session, api, 1, correlation_id, code, [requests.encode_error(sentence)])
        except Exception as error:
            self._fail(session.identity, session, api, correlation_id, error)

    def _on_decision(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Pass a request on to the coordinator."""
        self._ask(self._coordinator, session, header, body)

    def _on_delays(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Pass a request on to the scheduler."""
        self._ask(self._scheduler, session, header, body)

    def _ask(self, decider: Decider, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        self._one_frame(header, body, min(JSON_MAX_BYTES, decider.payload_max))
        requests.decode_request(body[0])
        decider.ask(session.word, header.api, header.correlation_id, body[0], self._now_ns)

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
        api = correlation_id = 0
        session = self._sessions.by_identity(identity)
        try:
            if not 1 <= len(message) <= FRAMES_MAX:
                raise WireError(ErrorCode.MALFORMED_REQUEST, f"{len(message)} frames; a request has 1 to {FRAMES_MAX}")
            header = decode_request_header(message[0])
            api, correlation_id = header.api, header.correlation_id
            body = message[1:]
            check_body(header.body_length, body)
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
            self._refuse(identity, session, api, correlation_id, error)
        except Exception as error:
            self._fail(identity, session, api, correlation_id, error)

    def _fail(self, identity: bytes, session: Session | None, api: int, correlation_id: int, error: Exception) -> None:
        """What nobody expected of one message: it is said and answered, and is the end of nothing else."""
        sentence = self._boundary.caught(f"api={api} correlation_id={correlation_id} session={session.number if session else 0}", error)
        if session is not None:
            self._unanswered.take(session.word, correlation_id)
        self._refuse(identity, session, api, correlation_id, WireError(ErrorCode.INTERNAL_ERROR, sentence))

    def _refuse(self, identity: bytes, session: Session | None, api: int, correlation_id: int, error: WireError) -> None:
        if error.code is not ErrorCode.SESSION_UNKNOWN:
            logger.info(
                "request_refused client=%s api=%d code=%s reason=%r",
                session.client_id if session else "?",
                api,
                error.code.name,
                error.detail,
            )
        self._slot.store(ProcessWord.REFUSED_COUNT, self._slot.load(ProcessWord.REFUSED_COUNT) + 1)
        body = [requests.encode_error(error.detail)]
        limit = session.credit.limit if session else 0
        self._transport.try_send(identity, encode_response(api, 1, correlation_id, error.code, limit, self._generation, body))

    def _one_frame(self, header: RequestHeader, body: list[bytes], limit: int = JSON_MAX_BYTES) -> None:
        if len(body) != 1:
            raise WireError(ErrorCode.MALFORMED_REQUEST, f"API {header.api} takes one body frame, {len(body)} came")
        if len(body[0]) > limit:
            raise WireError(ErrorCode.REQUEST_TOO_LARGE, f"{len(body[0])} bytes of JSON; {limit} are allowed: ask for less at once")
        self._slices.spend(1 + (len(body[0]) >> 9))

    def _on_handshake(self, identity: bytes, header: RequestHeader, body: list[bytes]) -> None:
        self._one_frame(header, body)
        request = requests.decode_handshake(body[0])
        old = self._sessions.by_identity(identity)
        if old is not None:
            self._drop(old)
        session = self._sessions.open(identity, request.client_id, self._ledger.open(), self._now_ns)
        session.timer = self._silences.add(self._now_ns + CREDIT_IDLE_NS, session)
        self._transport.shaken(identity, session.credit)
        self._slot.store(ProcessWord.SESSIONS, len(self._sessions))
        answer = {
            "versions": {str(api): version for api, version in request.versions.items()}, "generation": self._generation,
            "session": session.number, "cluster_id": self._cluster_id, "server": "tailrace", "auto_create_topics": self._auto_create_topics,
        }  # fmt: skip
        self._send(session, Api.HANDSHAKE, 1, header.correlation_id, ErrorCode.OK, [orjson.dumps(answer)])

    def _on_ping(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        if body:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "PING takes no body")
        self._send(session, Api.PING, 1, header.correlation_id, ErrorCode.OK)

    def _on_metadata(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        self._look_up(self._lookups.metadata, session, header, body)

    def _on_list_offsets(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        self._look_up(self._lookups.list_offsets, session, header, body)

    def _look_up(self, lookup: Lookup, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Begin a task that answers by itself, now or in slices."""
        self._one_frame(header, body)
        frame, api, correlation_id = body[0], header.api, header.correlation_id

        def answer(found: bytes) -> None:
            unsent = self._transport.unsent_bytes(session.identity)
            if unsent >= UNREAD_ANSWERS_MAX_BYTES:
                raise WireError(ErrorCode.TOO_MANY_REQUESTS, f"{unsent} bytes of answers wait to be read by this client; read them first")
            self._send(session, api, 1, correlation_id, ErrorCode.OK, [found])

        def on_error(error: Exception) -> None:
            if isinstance(error, WireError):
                self._refuse(session.identity, session, api, correlation_id, error)
            else:
                self._fail(session.identity, session, api, correlation_id, error)

        self._slices.begin(Task(session, len(frame), lambda: lookup(frame, answer), on_error), try_now=True)

    def _on_credit(self, session: Session, _header: RequestHeader, body: list[bytes]) -> None:
        if len(body) != 1:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "CREDIT takes one body frame")
        self._tell_credit(self._ledger.ask(session.credit, requests.decode_credit(body[0])))

    # ---- produce ---------------------------------------------------------------------------------------------------------------------

    def _on_produce(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        if len(body) != 2:
            raise WireError(ErrorCode.MALFORMED_REQUEST, f"PRODUCE takes two body frames, {len(body)} came")
        request = requests.decode_produce(body[0])
        batch = body[1]
        credit = session.credit
        if not self._ledger.receive(credit, len(batch)) and (
            credit.received > credit.granted + OVERDRAFT_BYTES or not self._ledger.has_room()
        ):
            received = credit.received
            self._tell_credit(self._ledger.release(credit, len(batch)))
            raise WireError(ErrorCode.CREDIT_EXCEEDED, f"{received} bytes sent, {credit.limit} are granted")
        route = self._routing.find(request.topic_id, request.partition)
        code = self._check_produce(route, request.topic_id, batch)
        if code is not ErrorCode.OK or route is None:
            self._tell_credit(self._ledger.release(session.credit, len(batch)))
            if request.acks:
                raise WireError(code, ERROR_TABLE[code].meaning)
            return
        if request.acks:
            refusal = self._unanswered.refusal(session.word, header.correlation_id)
            if refusal is not None:
                self._tell_credit(self._ledger.release(session.credit, len(batch)))
                raise refusal
            self._unanswered.add(session.word, header.correlation_id, header.api, self._now_ns, request.timeout_ms)
        waiting = Waiting(route.slot, _ACKS[request.acks], session, header.correlation_id, self._now_ns, batch)
        link = self._workers[route.worker]
        if link.waiting or not self._write(link, waiting):
            link.waiting.append(waiting)

    def _check_produce(self, route: Assignment | None, topic_id: bytes, batch: bytes) -> ErrorCode:
        if route is None:
            return ErrorCode.PARTITION_OUT_OF_RANGE if self._routing.knows(topic_id) else ErrorCode.UNKNOWN_TOPIC
        if len(batch) > int(route.settings["max.message.bytes"]):
            return ErrorCode.RECORD_TOO_LARGE
        if route.delay_of and not route.settings["delay.enabled"]:
            return ErrorCode.DELAY_NOT_ENABLED
        return ErrorCode.OK if len(batch) > HEADER_BYTES else ErrorCode.UNSUPPORTED_BATCH

    def _write(self, link: WorkerLink, item: Waiting) -> bool:
        """Copy a batch into its worker's lane; its credit is released."""
        batch = item.batch
        if not link.lane.try_write(
            LaneKind.PRODUCE, item.slot, item.flags, item.session.word, item.correlation_id, item.arrival_ns, (batch,)
        ):
            return False
        # Whoever waits for an answer hears of its credit there.
        hears_soon = item.session if item.flags else None
        self._tell_credit(self._ledger.release(item.session.credit, len(batch)), hears_soon)
        return True

    def _pass_on(self) -> int:
        """Move what waited into the lanes, publish, ring: once per group."""
        count = 0
        for link in self._workers.values():
            while link.waiting and self._write(link, link.waiting[0]):
                link.waiting.popleft()
                count += 1
            if link.lane.publish():
                link.bell.ring()
        count += self._coordinator.pass_on(self._now_ns) + self._scheduler.pass_on(self._now_ns)
        return count

    def _walk_rings(self) -> int:
        count = 0
        settled: set[int] = set()
        for link in self._workers.values():
            passed = link.acks.walk(self._answer, settled)
            if passed and link.ring.is_crowded():
                link.bell.ring()
            count += passed
        if settled:
            self._fetches.on_settled(settled)
        return count

    def _answer_late(self, now_ns: int) -> int:
        """Requests whose timeout has passed: they may still be carried out, and their sender is told that nobody knows yet."""
        late = self._unanswered.take_late(now_ns)
        for word, correlation_id, api in late:
            if api:
                self._answer_instead(word, api, correlation_id, ErrorCode.TIMED_OUT, "no answer within the request's timeout")
        return len(late)

    def _answer(self, answer: Answer) -> None:
        """To a batch. Nothing may be raised here: the walk over the ring would begin anew."""
        session = self._sessions.by_word(answer.session)
        if not self._unanswered.take(answer.session, answer.correlation_id) or session is None:
            return
        try:
            if answer.code is not ErrorCode.OK:
                body: Readable = orjson.dumps({"message": ERROR_TABLE[answer.code].meaning})
            else:
                flags = requests.PRODUCED_DUPLICATE if answer.is_duplicate else 0
                body = requests.encode_produced(
                    requests.ProduceResponse(answer.base_offset, answer.append_time_us, answer.leader_epoch, flags)
                )
            self._send(session, Api.PRODUCE, 1, answer.correlation_id, answer.code, [body])
        except Exception as error:
            self._fail(session.identity, session, Api.PRODUCE, answer.correlation_id, error)

    # ---- fetch -----------------------------------------------------------------------------------------------------------------------

    def _on_fetch(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        if len(body) != 1:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "FETCH takes one body frame")
        request = requests.decode_fetch(body[0])
        session.fetch_received = min(request.received_bytes, session.fetch_sent)
        self._fetches.begin(Fetch(session, header.correlation_id, request), self._now_ns)

    def _respond_fetch(self, fetch: Fetch, entries: list[FetchedEntry], data: memoryview) -> None:
        body: list[Readable] = [requests.encode_fetched(entries)]
        session = fetch.session
        length = len(body[0]) + len(data)
        head = encode_response(Api.FETCH, 1, fetch.correlation_id, ErrorCode.OK, session.credit.limit, self._generation, body)
        if not len(data):
            sent = self._transport.try_send(session.identity, head)
        else:
            head = encode_response(Api.FETCH, 1, fetch.correlation_id, ErrorCode.OK, session.credit.limit, self._generation, [*body, data])[
                :-1
            ]
            sent = self._transport.try_send_buffer(session.identity, head, data)
        self._slot.store(ProcessWord.BYTES_COUNT, self._slot.load(ProcessWord.BYTES_COUNT) + length)
        if not sent:
            self._drop(session)

    def _refuse_fetch(self, fetch: Fetch, error: Exception) -> None:
        session = fetch.session
        if isinstance(error, WireError):
            self._refuse(session.identity, session, Api.FETCH, fetch.correlation_id, error)
        else:
            self._fail(session.identity, session, Api.FETCH, fetch.correlation_id, error)

    # ---- sessions --------------------------------------------------------------------------------------------------------------------

    def _send(self, session: Session, api: int, version: int, correlation_id: int, code: ErrorCode, body: Sequence[Readable] = ()) -> None:
        frames = encode_response(api, version, correlation_id, code, session.credit.limit, self._generation, body)
        if not self._transport.try_send(session.identity, frames):
            self._drop(session)

    def _tell_credit(self, raised: list[Credit], but: Session | None = None) -> None:
        """Tell connections of a higher limit; `but` hears it with its next answer."""
        for credit in raised:
            session = self._sessions.by_credit(credit)
            if session is not None and session is not but:
                # A client that has sent its last with acks=0 and gone hears nothing, but what it sent is still being read: the session stays.
                frames = encode_response(Api.CREDIT, 1, PUSH_CORRELATION_ID, ErrorCode.OK, credit.limit, self._generation)
                self._transport.try_send(session.identity, frames)

    def _watch(self, now_ns: int) -> int:
        """Sessions end with their connections."""
        try:
            watched = self._transport.watch(now_ns)
        except Exception as error:
            self._boundary.caught("watch", error)
            return 0
        if watched.closed_count:
            self._slot.store(ProcessWord.REFUSED_COUNT, self._slot.load(ProcessWord.REFUSED_COUNT) + watched.closed_count)
        if watched.ended:
            self._endings.doubt(watched.ended, now_ns)
        return len(watched.ended)

    def _end_sessions(self, now_ns: int) -> None:
        """Drop the sessions whose connections are gone."""
        for identity in self._endings.take(self._is_reachable, now_ns):
            session = self._sessions.by_identity(identity)
            if session is not None:
                try:
                    self._drop(session)
                except Exception as error:
                    self._boundary.caught(f"end_of_session session={session.number}", error)

    def _is_reachable(self, identity: bytes) -> bool:
        """Whether libzmq still has the connection of a client with a session. What is sent to find out tells the client nothing new."""
        session = self._sessions.by_identity(identity)
        if session is None:
            return False
        frames = encode_response(Api.CREDIT, 1, PUSH_CORRELATION_ID, ErrorCode.OK, session.credit.limit, self._generation)
        return self._transport.try_send(identity, frames)

    def _drop(self, session: Session) -> None:
        """A session has ended: its connection has, it takes nothing, or its client came anew. The one place that tells everything that knows of it."""
        if self._sessions.by_word(session.word) is None:
            return
        self._sessions.close(session)
        if session.timer is not None:
            self._silences.cancel(session.timer)
            session.timer = None
        self._transport.shaken(session.identity, None)
        self._fetches.forget_session(session)
        self._slices.forget_session(session)
        for waiting in (self._unanswered, self._coordinator, self._scheduler):
            waiting.forget_session(session.word)
        self._slot.store(ProcessWord.SESSIONS, len(self._sessions))
        self._tell_credit(self._ledger.close(session.credit))

    def _look_at_silent_sessions(self, now_ns: int) -> None:
        """A silent connection gives its credit back, and is forgotten in the end."""
        for session in self._silences.advance(now_ns):
            try:
                self._look_at_silence(session, now_ns)
            except Exception as error:
                self._boundary.caught(f"silence session={session.number}", error)

    def _look_at_silence(self, session: Session, now_ns: int) -> None:
        silent_ns = now_ns - session.last_seen_ns
        if silent_ns >= SESSION_IDLE_NS:
            logger.info("session_idle client=%s dropped", session.client_id)
            session.timer = None
            self._drop(session)
            return
        if silent_ns >= CREDIT_IDLE_NS:
            self._tell_credit(self._ledger.lapse(session.credit))
            silent_ns = 0
        session.timer = self._silences.add(now_ns + CREDIT_IDLE_NS - silent_ns, session)


def build(context: ProcessContext, transport: Transport, files: LogFiles, pool: ReadAhead, generation: int) -> Front:
    """The front of this specification; it has asked to be fed. `generation`: a number that no front of this address had before."""
    spec, settings = context.spec, context.spec.settings

    def connect(worker: int) -> WorkerLink:
        ring = Ring(context.attach(f"ring-{worker}", RegionKind.RING))
        lane = context.lane_writer(process_name(Role.WORKER, worker))
        return WorkerLink(lane, context.bell(Role.WORKER, worker), ring, AckWalker(ring, spec.index, generation), deque())

    def decider(role: Role) -> DeciderLink:
        name, process = process_name(role, 0), context.control.process(role, 0)
        return DeciderLink(
            context.lane_writer(name), context.lane_reader(name), context.bell(role, 0), lambda: process.load(ProcessWord.GENERATION)
        )

    lane_half = int(settings["lane_bytes"]) // 2
    front = Front(
        transport=transport,
        generation=generation,
        process_generation=spec.generation,
        workers={w: connect(w) for w in range(int(settings["workers"]))},
        connect_worker=connect,
        coordinator=decider(Role.COORDINATOR),
        scheduler=decider(Role.SCHEDULER),
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


def open_files_max() -> int:
    """How many files of the log the front keeps open: a small part of what it may."""
    return max(8, min(OPEN_FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))


def limits(settings: dict[str, Any]) -> Limits:
    """What connections may cost; descriptors are left for files of the log, and for those that the reader pool has in hand."""
    credit_bytes = int(settings["credit_bytes"])
    unsent_max = max(UNSENT_MAX_BYTES, credit_bytes)
    free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd")) - 2 * open_files_max() - DESCRIPTORS_RESERVED
    return Limits(
        connections_max=max(1, min(int(settings["connections.max"]), free)),
        unshaken_peer_max=message_max_bytes(settings) + (64 << 10),
        unshaken_max=UNSHAKEN_MAX_BYTES,
        untaken_max=credit_bytes + UNSENT_MAX_BYTES,
        unsent_max=unsent_max,
        memory_growth_max=2 * credit_bytes + unsent_max + MEMORY_SLACK_BYTES,
    )


def message_max_bytes(settings: dict[str, Any]) -> int:
    """The largest frame that is taken from the network: what no lane has room for is refused with a code only a little beyond that."""
    return max(int(settings["lane_bytes"]) // 2, JSON_MAX_BYTES) + OVERDRAFT_BYTES


def main() -> None:
    """The process."""
    context = start()
    configure_logging(context)
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
    both = select.poll()
    both.register(router.socket.fileno(), select.POLLIN)
    both.register(router.monitor_fd, select.POLLIN)
    both.register(context.doorbell.fd, select.POLLIN)

    def wait(timeout_ms: float | None) -> None:
        if not front.takes_input:
            context.doorbell.wait(timeout_ms)
            return
        # ZeroMQ's descriptor tells of changes only: `step` has read until there was nothing, so whatever comes now makes it readable.
        if not router.has_input() and any(fd == router.monitor_fd for fd, _ in both.poll(timeout_ms)):
            router.watch_at_ns = 0
        context.doorbell.clear()

    run(front, context, wait)
    router.close()


if __name__ == "__main__":
    main()
