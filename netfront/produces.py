"""Batches on their way to the workers, and the answers to them.

Owner: one front; in shared memory the tails of its lanes to the workers, and its cursor in each ring.
Invariants: a connection's batches reach their worker in the order in which they came; a batch's credit is released when it is in its lane, or refused;
    a request is answered once (acks=0: never).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import orjson

from netfront.acks import AckWalker, Answer
from netfront.credits import CreditLedger
from netfront.replies import Replies
from netfront.routing import Routing
from netfront.sessions import Session, Sessions
from netfront.unanswered import Unanswered
from shm.catalog_messages import Assignment, LaneKind
from shm.doorbell import Doorbell
from shm.lane import LaneWriter
from shm.layout import ACKS_ALL, ACKS_LEADER, ACKS_MASK, ACKS_NONE, SLOT_MAP_SHIFT
from shm.outbox import Outbox
from shm.ring import Ring
from tailrace.formats.batch_header import HEADER_BYTES
from tailrace.formats.checksum import Readable
from tailrace.hash_slots import VERSION_MAX
from tailrace.protocol import requests
from tailrace.protocol.errors import ERROR_TABLE, ErrorCode
from tailrace.protocol.wire import Api, RequestHeader, WireError

SESSION_PRODUCES_MAX = 32_768
PRODUCES_MAX = 131_072
"""Batches that wait for their answer, of one connection and of all: five under way to each of 4,096 partitions are 20,480."""
OVERDRAFT_BYTES = 1 << 20
NO_SLOT_MAP = (
    "the topic routes by hash slots (partitioner=hash_slots), and this client does not say by which map it has routed: use one that knows them, or a topic "
    "with partitioner=producer"
)
_ACKS = {0: ACKS_NONE, 1: ACKS_LEADER, requests.ACKS_ALL: ACKS_ALL}


class Batch(NamedTuple):
    """A batch on its way to its worker's lane."""

    slot: int
    flags: int
    session: Session
    correlation_id: int
    arrival_ns: int
    batch: bytes


@dataclass(slots=True)
class WorkerLink:
    """The way to one worker, and its ring."""

    lane: LaneWriter
    bell: Doorbell
    ring: Ring
    acks: AckWalker


class _Worker(NamedTuple):
    """A worker that is reached."""

    outbox: Outbox[Batch]
    ring: Ring
    acks: AckWalker


class Produces:
    """PRODUCE, from its request to its answer."""

    def __init__(
        self,
        *,
        workers: dict[int, WorkerLink],
        connect_worker: Callable[[int], WorkerLink],
        routing: Routing,
        ledger: CreditLedger,
        sessions: Sessions,
        replies: Replies,
        on_settled: Callable[[set[int]], None],
        start_ns: int,
    ) -> None:
        """`on_settled`: called with the slots whose watermarks may have moved."""
        self._workers = {number: self._reached(link) for number, link in workers.items()}
        self._connect_worker = connect_worker
        self._routing = routing
        self._ledger = ledger
        self._sessions = sessions
        self._replies = replies
        self._on_settled = on_settled
        self._unanswered = Unanswered(start_ns, SESSION_PRODUCES_MAX, PRODUCES_MAX)
        """Batches that a worker has."""
        self.now_ns = start_ns
        """Of this turn of the loop; the front sets it."""

    def _reached(self, link: WorkerLink) -> _Worker:
        return _Worker(Outbox(link.lane, link.bell, partial(self._write, link.lane)), link.ring, link.acks)

    def reach(self, worker: int) -> None:
        """Make sure that there is a way to this worker: a dedicated one is started after the front."""
        if worker not in self._workers:
            self._workers[worker] = self._reached(self._connect_worker(worker))

    # ---- in --------------------------------------------------------------------------------------------------------------------------

    def take(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """A request. Raises WireError: the caller answers with it."""
        if len(body) != 2:
            raise WireError(ErrorCode.MALFORMED_REQUEST, f"PRODUCE takes two body frames, {len(body)} came")
        request = requests.decode_produce(body[0])
        batch = body[1]
        credit = session.credit
        if not self._ledger.receive(credit, len(batch)) and (
            credit.received > credit.granted + OVERDRAFT_BYTES or not self._ledger.has_room()
        ):
            received = credit.received
            self._replies.tell_credit(self._ledger.release(credit, len(batch)))
            raise WireError(ErrorCode.CREDIT_EXCEEDED, f"{received} bytes sent, {credit.limit} are granted")
        route = self._routing.find(request.topic_id, request.partition)
        code = self._check(route, request, batch)
        if code is not ErrorCode.OK or route is None:
            self._replies.tell_credit(self._ledger.release(session.credit, len(batch)))
            if request.acks:
                raise WireError(code, NO_SLOT_MAP if code is ErrorCode.INVALID_REQUEST else ERROR_TABLE[code].meaning)
            return
        flags = _ACKS[request.acks]
        if route.slot_counts:
            flags |= request.slot_map_version << SLOT_MAP_SHIFT
        if request.acks:
            refusal = self._unanswered.refusal(session.word, header.correlation_id)
            if refusal is not None:
                self._replies.tell_credit(self._ledger.release(session.credit, len(batch)))
                raise refusal
            self._unanswered.add(session.word, header.correlation_id, header.api, header.version, self.now_ns, request.timeout_ms)
        self._workers[route.worker].outbox.put(Batch(route.slot, flags, session, header.correlation_id, self.now_ns, batch))

    def _check(self, route: Assignment | None, request: requests.ProduceRequest, batch: bytes) -> ErrorCode:
        if route is None:
            return ErrorCode.PARTITION_OUT_OF_RANGE if self._routing.knows(request.topic_id) else ErrorCode.UNKNOWN_TOPIC
        if len(batch) > int(route.settings["max.message.bytes"]):
            return ErrorCode.RECORD_TOO_LARGE
        if route.delay_of and not route.settings["delay.enabled"]:
            return ErrorCode.DELAY_NOT_ENABLED
        if route.slot_counts and not 0 < request.slot_map_version <= VERSION_MAX:
            return ErrorCode.INVALID_REQUEST
        return ErrorCode.OK if len(batch) > HEADER_BYTES else ErrorCode.UNSUPPORTED_BATCH

    def _write(self, lane: LaneWriter, item: Batch) -> bool:
        """Copy a batch into its worker's lane; its credit is released."""
        batch = item.batch
        if not lane.try_write(LaneKind.PRODUCE, item.slot, item.flags, item.session.word, item.correlation_id, item.arrival_ns, (batch,)):
            return False
        # A client that waits for an answer hears of its credit there.
        hears_soon = item.session if item.flags & ACKS_MASK else None
        self._replies.tell_credit(self._ledger.release(item.session.credit, len(batch)), hears_soon)
        return True

    def pass_on(self) -> int:
        """Move what waited into the lanes, publish, ring: once per group."""
        count = 0
        for worker in self._workers.values():
            count += worker.outbox.flush()
        return count

    # ---- out -------------------------------------------------------------------------------------------------------------------------

    def walk_rings(self) -> int:
        """Answer what the workers and flushers have decided since the last walk."""
        count = 0
        settled: set[int] = set()
        for worker in self._workers.values():
            passed = worker.acks.walk(self._answer, settled)
            if passed and worker.ring.is_crowded():
                worker.outbox.bell.ring()
            count += passed
        if settled:
            self._on_settled(settled)
        return count

    def _answer(self, answer: Answer) -> None:
        """To a batch. Nothing may be raised here: the walk over the ring would begin anew."""
        session = self._sessions.by_word(answer.session)
        asked = self._unanswered.take(answer.session, answer.correlation_id)
        if asked is None or session is None:
            return
        version = asked[1]
        try:
            if answer.code is not ErrorCode.OK:
                body: Readable = orjson.dumps({"message": ERROR_TABLE[answer.code].meaning})
            else:
                flags = requests.PRODUCED_DUPLICATE if answer.is_duplicate else 0
                body = requests.encode_produced(
                    requests.ProduceResponse(answer.base_offset, answer.append_time_us, answer.leader_epoch, flags)
                )
            self._replies.send(session, Api.PRODUCE, version, answer.correlation_id, answer.code, [body])
        except Exception as error:
            self._replies.fail(session.identity, session, Api.PRODUCE, version, answer.correlation_id, error)

    def next_deadline_ns(self) -> int:
        """When `answer_late` next has something to do."""
        return self._unanswered.timeouts.quiet_until_ns

    def answer_late(self, now_ns: int) -> int:
        """Requests whose timeout has passed: they may still be carried out, and their sender is told that it is not known yet."""
        late = self._unanswered.take_late(now_ns)
        for word, correlation_id, api, version in late:
            body = requests.encode_error("no answer within the request's timeout")
            self._replies.answer_late(word, api, version, correlation_id, ErrorCode.TIMED_OUT, body)
        return len(late)

    def forget(self, word: int, correlation_id: int) -> None:
        """The request was answered otherwise."""
        self._unanswered.take(word, correlation_id)

    def forget_session(self, session: Session) -> None:
        """The client is gone; what it sent is appended all the same."""
        self._unanswered.forget_session(session.word)

    def has_unanswered(self) -> bool:
        """Whether a client waits for an answer."""
        return len(self._unanswered) > 0

    def has_more(self) -> bool:
        """Whether there is something to walk over."""
        return any(worker.acks.has_more() for worker in self._workers.values())

    def is_finished(self) -> bool:
        """Whether everything that came was passed on and answered."""
        return all(worker.outbox.is_empty() and worker.acks.is_caught_up() for worker in self._workers.values())
