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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from netfront.acks import AckWalker, Answer
from netfront.credits import Credit, CreditLedger
from netfront.fetches import Fetch, FetchService
from netfront.log_files import DiskLogFiles, LogFiles
from netfront.log_reader import LogReader, LogReadError
from netfront.peers import Limits
from netfront.reader_pool import ReadAhead, ReaderPool
from netfront.router import AddressInUseError, Router, Watched
from netfront.routing import Routing
from netfront.sessions import Session, Sessions
from shm.assignments import Assignment, LaneKind
from shm.boundary import Boundary
from shm.control import ProcessSlot
from shm.doorbell import Doorbell
from shm.lane import LaneMessage, LaneReader, LaneWriter
from shm.layout import ACKS_ALL, ACKS_LEADER, ACKS_NONE, ProcessWord, RegionKind, Role
from shm.process import EXIT_ADDRESS_IN_USE, ProcessContext, configure_logging, process_name, run, start
from shm.ring import Ring
from tailrace.batch_header import HEADER_BYTES
from tailrace.checksum import Readable
from tailrace.front_addresses import front_address
from tailrace.protocol import requests
from tailrace.protocol.errors import ERROR_TABLE, ErrorCode
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
from workers.timing_wheel import NEVER_NS, Timer, TimingWheel

logger = logging.getLogger(__name__)

RECEIVE_LIMIT = 256
"""Messages taken from the socket before everything else has its turn."""
SESSION_IDLE_NS = 600_000_000_000
CREDIT_IDLE_NS = 60_000_000_000
DECISION_TIMEOUT_MS = 35_000
"""The coordinator answers within 30 s, unless it was killed."""
DELAYS_TIMEOUT_MS = 15_000
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


@dataclass(slots=True)
class DeciderLink:
    """The way to the coordinator, or to the scheduler, and back."""

    to_it: LaneWriter
    from_it: LaneReader
    bell: Doorbell
    requests: deque[tuple[int, int, int, bytes]] = field(default_factory=deque)
    """(API, session, correlation id, JSON) of requests that do not fit the lane yet."""


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
        coordinator_generation: Callable[[], int],
        scheduler_generation: Callable[[], int],
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
        self._coordinator = coordinator
        self._scheduler = scheduler
        self._coordinator_generation = coordinator_generation
        self._known_coordinator = coordinator_generation()
        self._scheduler_generation = scheduler_generation
        self._known_scheduler = scheduler_generation()
        self._front_ports = front_ports
        self._routing = routing
        self._reader = reader
        self._pool = pool
        self._ledger = ledger
        self._slot = slot
        self._boundary = Boundary(slot)
        self._cluster_id = cluster_id
        self._auto_create_topics = auto_create_topics
        self._on_ready = on_ready
        self._sessions = Sessions(generation)
        self._fetch_wheel: TimingWheel[Fetch] = TimingWheel(start_ns)
        self._fetches = FetchService(reader, routing, pool, self._fetch_wheel, self._respond_fetch, transport.new_buffer)
        self._unanswered: dict[tuple[int, int], tuple[int, Timer[tuple[int, int]]]] = {}
        """(session word, correlation id) -> (API, timeout) of a request that a worker or the coordinator has."""
        self._timeouts: TimingWheel[tuple[int, int]] = TimingWheel(start_ns)
        self._fed = False
        self._stopping = False
        self._silences: TimingWheel[Session] = TimingWheel(start_ns, tick_ns=1_000_000_000)
        """When to look whether a session has been silent."""
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
        received = self._receive() if self.takes_input else 0
        work += received + self._pass_on()
        work += self._walk_rings()
        work += self._fetches.on_reads_completed(now_ns)
        if now_ns >= self._fetch_wheel.quiet_until_ns:
            work += self._fetches.on_timeouts(now_ns)
        if now_ns >= self._timeouts.quiet_until_ns:
            work += self._answer_late(now_ns)
        if now_ns >= self._silences.quiet_until_ns:
            self._look_at_silent_sessions(now_ns)
        if now_ns >= self._transport.watch_at_ns:
            work += self._watch(now_ns)
        if self._ledger.is_contended and now_ns >= self._sweep_at_ns:
            self._sweep_at_ns = now_ns + SWEEP_NS
            if received < RECEIVE_LIMIT:  # else what somebody has used may not have been read yet
                self._tell_credit(self._ledger.sweep())
        return work

    def has_more(self) -> bool:
        return any(link.acks.has_more() for link in self._workers.values())

    def next_deadline_ns(self) -> int | None:
        deadline_ns = min(
            self._fetch_wheel.quiet_until_ns,
            self._timeouts.quiet_until_ns,
            self._silences.quiet_until_ns,
            self._transport.watch_at_ns,
            self._sweep_at_ns if self._ledger.is_contended else NEVER_NS,
        )
        return deadline_ns if deadline_ns < NEVER_NS else None

    def begin_stop(self) -> None:
        """Read nothing more; what was read is passed on and answered."""
        self._stopping = True
        self._fetches.answer_all()

    def is_finished(self) -> bool:
        return all(not link.waiting and link.lane.is_empty() and link.acks.is_caught_up() for link in self._workers.values())

    # ---- coordinator -----------------------------------------------------------------------------------------------------------------

    def _on_other_coordinator(self) -> None:
        """A killed coordinator has taken requests with it: who only asked asks again; of a change nobody knows."""
        self._known_coordinator = self._coordinator_generation()
        asked = (Api.INIT_PRODUCER_ID, Api.DESCRIBE_CLUSTER, Api.LEASE_OFFSETS)
        self._give_up(asked, ErrorCode.NOT_READY, "the coordinator was restarted; ask again")
        changes = (Api.CREATE_TOPICS, Api.DELETE_TOPICS, Api.ALTER_TOPICS, Api.DELETE_RECORDS)
        self._give_up(
            changes, ErrorCode.TIMED_OUT, "the coordinator was restarted: nobody knows whether the change was made; list the topics"
        )

    def _on_other_scheduler(self) -> None:
        """A killed scheduler has taken requests with it: who only asked asks again; of a change nobody knows."""
        self._known_scheduler = self._scheduler_generation()
        self._give_up((Api.LIST_DELAYS, Api.DESCRIBE_DELAYS), ErrorCode.NOT_READY, "the scheduler was restarted; ask again")
        self._give_up(
            (Api.CHANGE_DELAYS,),
            ErrorCode.TIMED_OUT,
            "the scheduler was restarted: nobody knows whether the change was made; list what is pending",
        )

    def _give_up(self, apis: tuple[Api, ...], code: ErrorCode, message: str) -> None:
        """Answer requests that nobody else will."""
        for word, correlation_id in [key for key, (api, _) in self._unanswered.items() if api in apis]:
            api = self._take_unanswered((word, correlation_id))
            session = self._sessions.by_word(word)
            if session is not None:
                self._send(session, api, 1, correlation_id, code, [orjson.dumps({"message": message})])

    def _read_coordinator(self) -> int:
        if self._coordinator_generation() != self._known_coordinator:
            self._on_other_coordinator()
        lane = self._coordinator.from_it
        count = 0
        while (message := lane.peek()) is not None:
            if message.kind == LaneKind.ASSIGN:
                assignment = Assignment.decode(message.payload)
                if assignment.dropped:
                    self._reader.forget(assignment)
                elif assignment.worker not in self._workers:  # a dedicated one, started since
                    self._workers[assignment.worker] = self._connect_worker(assignment.worker)
                self._routing.apply(assignment)
            elif message.kind == LaneKind.FED and message.correlation_id == self._process_generation and not self._fed:
                self._fed = True
                self._on_ready()
            elif message.kind == LaneKind.RESPONSE:
                self._pass_back(message)
            lane.advance(message)
            lane.consume()
            count += 1
        return count

    def _read_scheduler(self) -> int:
        if self._scheduler_generation() != self._known_scheduler:
            self._on_other_scheduler()
        lane = self._scheduler.from_it
        count = 0
        while (message := lane.peek()) is not None:
            self._pass_back(message)
            lane.advance(message)
            lane.consume()
            count += 1
        return count

    def _pass_back(self, message: LaneMessage) -> None:
        """An answer of the coordinator or the scheduler, to whoever asked."""
        session = self._sessions.by_word(message.session)
        api = self._take_unanswered((message.session, message.correlation_id))
        if session is not None and api:
            self._send(session, api, 1, message.correlation_id, ErrorCode(message.flags), [bytes(message.payload)])

    def _on_decision(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Pass a request on to the coordinator."""
        self._one_frame(header, body)
        requests.decode_json(body[0])
        self._expect_answer(session, header, DECISION_TIMEOUT_MS)
        self._coordinator.requests.append((header.api, session.word, header.correlation_id, body[0]))

    def _on_delays(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Pass a request on to the scheduler."""
        self._one_frame(header, body)
        requests.decode_json(body[0])
        self._expect_answer(session, header, DELAYS_TIMEOUT_MS)
        self._scheduler.requests.append((header.api, session.word, header.correlation_id, body[0]))

    # ---- requests --------------------------------------------------------------------------------------------------------------------

    def _receive(self) -> int:
        count = 0
        while count < RECEIVE_LIMIT and (frames := self._transport.try_receive()) is not None:
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
            low, high = API_VERSIONS[Api(api)]
            if not low <= header.version <= high:
                raise WireError(
                    ErrorCode.UNSUPPORTED_VERSION, f"version {header.version} of {Api(api).name}; this front speaks {low} to {high}"
                )
            handler(session, header, body)
        except WireError as error:
            self._refuse(identity, session, api, correlation_id, error)

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
        body = [orjson.dumps({"message": error.detail})]
        limit = session.credit.limit if session else 0
        self._transport.try_send(identity, encode_response(api, 1, correlation_id, error.code, limit, self._generation, body))

    def _one_frame(self, header: RequestHeader, body: list[bytes]) -> None:
        if len(body) != 1:
            raise WireError(ErrorCode.MALFORMED_REQUEST, f"API {header.api} takes one body frame, {len(body)} came")
        limit = min(JSON_MAX_BYTES, self._coordinator.to_it.payload_max)
        if len(body[0]) > limit:
            raise WireError(ErrorCode.REQUEST_TOO_LARGE, f"{len(body[0])} bytes of JSON; {limit} are allowed")

    def _on_handshake(self, identity: bytes, header: RequestHeader, body: list[bytes]) -> None:
        self._one_frame(header, body)
        request = requests.decode_json(body[0])
        offered = request.get("versions")
        if not isinstance(offered, dict):
            raise WireError(ErrorCode.MALFORMED_REQUEST, "the handshake needs `versions`: API number -> [lowest, highest]")
        chosen: dict[str, int] = {}
        for api, (low, high) in API_VERSIONS.items():
            theirs = offered.get(str(int(api)))
            if isinstance(theirs, list) and len(theirs) == 2 and all(isinstance(v, int) for v in theirs):
                common = min(high, theirs[1])
                if common >= max(low, theirs[0]):
                    chosen[str(int(api))] = common
        if str(int(Api.HANDSHAKE)) not in chosen:
            raise WireError(
                ErrorCode.UNSUPPORTED_VERSION, f"no version in common; this front speaks {API_VERSIONS[Api.HANDSHAKE]} of HANDSHAKE"
            )
        old = self._sessions.by_identity(identity)
        if old is not None:
            self._drop(old)
        client_id = str(request.get("client_id", ""))[:100]
        session = self._sessions.open(identity, client_id, self._ledger.open(), self._now_ns)
        session.timer = self._silences.add(self._now_ns + CREDIT_IDLE_NS, session)
        self._transport.shaken(identity, session.credit)
        self._slot.store(ProcessWord.SESSIONS, len(self._sessions))
        answer = {
            "versions": chosen, "generation": self._generation, "session": session.number, "cluster_id": self._cluster_id, "server": "tailrace",
            "auto_create_topics": self._auto_create_topics,
        }  # fmt: skip
        self._send(session, Api.HANDSHAKE, 1, header.correlation_id, ErrorCode.OK, [orjson.dumps(answer)])

    def _on_ping(self, session: Session, header: RequestHeader, _body: list[bytes]) -> None:
        self._send(session, Api.PING, 1, header.correlation_id, ErrorCode.OK)

    def _on_metadata(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Topics by name, or all (`topics` null; with `names_only`, only their names)."""
        self._one_frame(header, body)
        request = requests.decode_json(body[0])
        names = request.get("topics")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise WireError(ErrorCode.MALFORMED_REQUEST, "`topics` must be a list of names, or null for all")
        wanted = self._routing.names() if names is None else names
        if request.get("names_only"):
            answer: dict[str, Any] = {"topics": [{"name": name, "partitions": self._routing.partition_count(name)} for name in wanted]}
        else:
            described = [(name, self._routing.describe(name)) for name in wanted]
            topics = [topic or {"name": name, "code": int(ErrorCode.UNKNOWN_TOPIC)} for name, topic in described]
            answer = {"topics": topics, "fronts": [{"port": port} for port in self._front_ports()]}
        self._send(session, Api.METADATA, 1, header.correlation_id, ErrorCode.OK, [orjson.dumps(answer)])

    def _on_list_offsets(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        self._one_frame(header, body)
        wanted = requests.decode_json(body[0]).get("partitions")
        if not isinstance(wanted, list) or not all(isinstance(item, dict) for item in wanted):
            raise WireError(ErrorCode.MALFORMED_REQUEST, "`partitions` must be a list of {topic, partition, at}")
        self._send(
            session,
            Api.LIST_OFFSETS,
            1,
            header.correlation_id,
            ErrorCode.OK,
            [orjson.dumps({"offsets": [self._offset_of(w) for w in wanted]})],
        )

    def _offset_of(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """One entry of a LIST_OFFSETS answer: `at` is "earliest", "latest", a time in microseconds, for which it is the offset of the batch to
        look in (-1: none), or {"behind": offset}, for which it is where the next batch begins.
        """
        topic, partition, at = wanted.get("topic"), wanted.get("partition"), wanted.get("at")
        answer: dict[str, Any] = {"topic": topic, "partition": partition, "code": 0, "offset": -1}
        if not isinstance(topic, str) or not isinstance(partition, int):
            return {**answer, "code": int(ErrorCode.INVALID_REQUEST)}
        route = self._routing.find_by_name(topic, partition)
        if route is None:
            known = self._routing.partition_count(topic)
            return {**answer, "code": int(ErrorCode.PARTITION_OUT_OF_RANGE if known else ErrorCode.UNKNOWN_TOPIC)}
        try:
            state = self._reader.state(route)
            answer.update(
                beginning=state.log_start_offset, end=state.high_watermark, leader_epoch=state.leader_epoch, size_bytes=state.size_bytes,
                max_timestamp_us=state.max_timestamp_us, state=state.state.name,
            )  # fmt: skip
            if at == "earliest":
                answer["offset"] = state.log_start_offset
            elif at == "latest":
                answer["offset"] = state.high_watermark
            elif isinstance(at, dict) and isinstance(at.get("behind"), int):
                answer["offset"] = self._reader.behind(route, state, at["behind"])
            elif isinstance(at, int):
                found = self._reader.find_time(route, at)
                answer["offset"] = -1 if found is None else found
            else:
                answer["code"] = int(ErrorCode.INVALID_REQUEST)
        except LogReadError as error:
            answer["code"] = int(error.code)
        except OSError as error:
            logger.error("read_failed topic=%s partition=%d error=%r", topic, partition, str(error))
            answer["code"] = int(ErrorCode.STORAGE_ERROR)
        return answer

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
            self._expect_answer(session, header, request.timeout_ms)
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
        for decider in (self._coordinator, self._scheduler):
            while decider.requests:
                api, session, correlation_id, payload = decider.requests[0]
                if not decider.to_it.try_write(LaneKind.REQUEST, api, 0, session, correlation_id, self._now_ns, (payload,)):
                    break
                decider.requests.popleft()
                count += 1
            if decider.to_it.publish():
                decider.bell.ring()
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

    def _expect_answer(self, session: Session, header: RequestHeader, timeout_ms: int) -> None:
        key = (session.word, header.correlation_id)
        self._unanswered[key] = header.api, self._timeouts.add(self._now_ns + timeout_ms * 1_000_000, key)

    def _take_unanswered(self, key: tuple[int, int]) -> int:
        """The API of a request that is to be answered now; 0: it has been, with TIMED_OUT."""
        api, timer = self._unanswered.pop(key, (0, None))
        if timer is not None:
            self._timeouts.cancel(timer)
        return api

    def _answer_late(self, now_ns: int) -> int:
        """Requests whose timeout has passed: they may still be carried out, and their sender is told that nobody knows yet."""
        late = self._timeouts.advance(now_ns)
        for key in late:
            api, _ = self._unanswered.pop(key, (0, None))
            session = self._sessions.by_word(key[0])
            if api and session is not None:
                body = orjson.dumps({"message": "no answer within the request's timeout"})
                self._send(session, api, 1, key[1], ErrorCode.TIMED_OUT, [body])
        return len(late)

    def _answer(self, answer: Answer) -> None:
        try:
            self._answer_produce(answer)
        except Exception as error:
            self._boundary.caught(f"answer session={answer.session} correlation_id={answer.correlation_id}", error)

    def _answer_produce(self, answer: Answer) -> None:
        session = self._sessions.by_word(answer.session)
        if not self._take_unanswered((answer.session, answer.correlation_id)) or session is None:
            return
        if answer.code is not ErrorCode.OK:
            body: Readable = orjson.dumps({"message": ERROR_TABLE[answer.code].meaning})
        else:
            flags = requests.PRODUCED_DUPLICATE if answer.is_duplicate else 0
            body = requests.encode_produced(requests.ProduceResponse(answer.base_offset, answer.append_time_us, answer.leader_epoch, flags))
        self._send(session, Api.PRODUCE, 1, answer.correlation_id, answer.code, [body])

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
        for identity in watched.ended:
            session = self._sessions.by_identity(identity)
            if session is not None:
                try:
                    self._drop(session)
                except Exception as error:
                    self._boundary.caught(f"end_of_session session={session.number}", error)
        return len(watched.ended)

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
        name = process_name(role, 0)
        return DeciderLink(context.lane_writer(name), context.lane_reader(name), context.bell(role, 0))

    coordinator = context.control.process(Role.COORDINATOR, 0)
    scheduler = context.control.process(Role.SCHEDULER, 0)
    lane_half = int(settings["lane_bytes"]) // 2
    front = Front(
        transport=transport,
        generation=generation,
        process_generation=spec.generation,
        workers={w: connect(w) for w in range(int(settings["workers"]))},
        connect_worker=connect,
        coordinator=decider(Role.COORDINATOR),
        scheduler=decider(Role.SCHEDULER),
        coordinator_generation=lambda: coordinator.load(ProcessWord.READY_GENERATION),
        scheduler_generation=lambda: scheduler.load(ProcessWord.READY_GENERATION),
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
