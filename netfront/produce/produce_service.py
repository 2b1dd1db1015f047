"""Batches on their way to the workers, and the answers to them.

Owner: one front; in shared memory the tails of its lanes to the workers, and its cursor in each ring.
Invariants: a connection's batches reach their worker in the order in which they came; a request that is malformed or beyond its credit leaves nothing in
    a lane; a batch's credit is released when it is in its lane, or refused; a request is answered once, when all of its batches are or its timeout has
    passed (acks=0: never); a batch that waits for room holds no more than its own bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import orjson

from netfront.acks import AckWalker, Answer
from netfront.credits import CreditLedger
from netfront.replies import Replies
from netfront.routing import Routing
from netfront.sessions import Session, Sessions
from netfront.tickets import TICKET_INDEX_MASK, Asked, Tickets
from shm.catalog_messages import LaneKind
from shm.doorbell import Doorbell
from shm.lane import LaneWriter
from shm.layout import ACKS_ALL, ACKS_LEADER, ACKS_NONE, SLOT_MAP_SHIFT
from shm.outbox import Outbox
from shm.ring import Ring
from tailrace.formats.batch_header import HEADER_BYTES
from tailrace.formats.checksum import Readable
from tailrace.hash_slots import VERSION_MAX
from tailrace.kernel import read_produce
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
PLAIN_VERSION = 2
"""Of PRODUCE: what `read_produce` reads."""
_PRODUCE = int(LaneKind.PRODUCE)


class Batch(NamedTuple):
    """A batch that waits for room in its worker's lane."""

    slot: int
    flags: int
    session: Session
    ticket: int
    arrival_ns: int
    batch: Readable


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


class _Target(NamedTuple):
    """What a partition's batches need to know, made from its route once."""

    outbox: Outbox[Batch]
    write: Callable[[int, int, int, int, int, int, tuple[Readable]], bool]
    """Of its lane."""
    slot: int
    bytes_max: int
    has_slot_maps: bool
    refuses: bool
    """It is the delay log of a topic that takes no delayed records."""


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
        self._tickets = Tickets(SESSION_PRODUCES_MAX, PRODUCES_MAX)
        """Of batches that a worker has."""
        self._targets: dict[tuple[bytes, int], _Target] = {}
        """By topic id and partition; made anew when routes have changed."""
        self._targets_of = -1
        """Which state of the routes they were made from."""
        self._answered: list[Asked] = []
        """Requests whose last batch was answered in this walk over the rings."""
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
        entries: Sequence[tuple[bytes, int, int, int]]
        batches: Sequence[Readable]
        if header.version == 1:
            if len(body) != 2:
                raise WireError(ErrorCode.MALFORMED_REQUEST, f"PRODUCE takes two body frames, {len(body)} came")
            topic_id, partition, acks, timeout_ms, slot_map_version = requests.decode_produce(body[0])
            batches = body[1:]
            entries = [(topic_id, partition, slot_map_version, len(body[1]))]
        else:
            if not body:
                raise WireError(ErrorCode.MALFORMED_REQUEST, "PRODUCE takes a frame of entries, and frames of batches")
            acks, timeout_ms, entries = requests.decode_produce_batches(body[0])
            batches = requests.cut_batches(entries, body[1:])
        self.take_read(
            session, header.version, header.correlation_id, acks, timeout_ms, entries, batches, header.body_length - len(body[0])
        )

    def take_plain(self, session: Session, frames: list[bytes]) -> bool:
        """The short way of most requests: one that the kernel reads is taken, or answered with its refusal. False: nothing is done, another reads it."""
        read = read_produce(frames)
        if read is None:
            return False
        try:
            self.take_read(session, PLAIN_VERSION, *read)
        except WireError as error:
            self._replies.refuse(session.identity, session, Api.PRODUCE, PLAIN_VERSION, read[0], error)
        except Exception as error:
            self.forget(session.word, read[0])
            self._replies.fail(session.identity, session, Api.PRODUCE, PLAIN_VERSION, read[0], error)
        return True

    def take_read(
        self, session: Session, version: int, correlation_id: int, acks: int, timeout_ms: int, entries: Sequence[tuple[bytes, int, int, int]],
        batches: Sequence[Readable], byte_count: int,
    ) -> None:  # fmt: skip
        """A request that is well formed; the frames of its batches have `byte_count` bytes. Raises WireError: the caller answers with it."""
        self._receive(session, byte_count)
        if not acks:
            self._pass(session, ACKS_NONE, 0, entries, batches)
            return
        word = session.word
        refusal = self._tickets.refusal(word, correlation_id, len(entries))
        if refusal is not None:
            self._replies.tell_credit(self._ledger.release(session.credit, byte_count), session)
            raise refusal
        asked = self._tickets.open(word, correlation_id, version, len(entries), self.now_ns, timeout_ms)
        refused = self._pass(session, ACKS_LEADER if acks == 1 else ACKS_ALL, asked.ticket, entries, batches)
        if refused:
            self._answer_refused(session, asked, refused)

    def _answer_refused(self, session: Session, asked: Asked, refused: list[tuple[int, ErrorCode]]) -> None:
        """Some batches of a request went to no worker."""
        if asked.body is None:
            self._tickets.close(asked)
            code = refused[0][1]
            raise WireError(code, NO_SLOT_MAP if code is ErrorCode.INVALID_REQUEST else ERROR_TABLE[code].meaning)
        self._replies.note_refused(session, Api.PRODUCE, [code for _, code in refused])
        for index, code in refused:
            asked.settle(index, code)
        if not asked.left:
            self._tickets.close(asked)
            self._replies.send(session, Api.PRODUCE, asked.version, asked.correlation_id, ErrorCode.OK, [asked.body])

    def _receive(self, session: Session, byte_count: int) -> None:
        """Count the bytes of a request's batches. Raises WireError."""
        credit = session.credit
        if not self._ledger.receive(credit, byte_count) and (
            credit.received > credit.granted + OVERDRAFT_BYTES or not self._ledger.has_room()
        ):
            received = credit.received
            self._replies.tell_credit(self._ledger.release(credit, byte_count), session)
            raise WireError(ErrorCode.CREDIT_EXCEEDED, f"{received} bytes sent, {credit.limit} are granted")

    def _pass(
        self, session: Session, acks: int, ticket: int, entries: Sequence[tuple[bytes, int, int, int]], batches: Sequence[Readable]
    ) -> list[tuple[int, ErrorCode]]:
        """Give each batch to its worker; returns which are refused instead, and why. `ticket`: of the first."""
        if self._targets_of != self._routing.changes:
            self._targets.clear()
            self._targets_of = self._routing.changes
        find_target = self._targets.get
        word, now_ns = session.word, self.now_ns
        refused: list[tuple[int, ErrorCode]] = []
        released = index = 0
        try:
            for (topic_id, partition, slot_map_version, length), batch in zip(entries, batches, strict=True):
                target = find_target((topic_id, partition)) or self._find_target(topic_id, partition)
                if target is None:
                    knows = self._routing.knows(topic_id)
                    refused.append((index, ErrorCode.PARTITION_OUT_OF_RANGE if knows else ErrorCode.UNKNOWN_TOPIC))
                    released += length
                    index += 1
                    continue
                outbox, write, slot, bytes_max, has_slot_maps, refuses = target
                if length > bytes_max or length <= HEADER_BYTES or refuses or (has_slot_maps and not 0 < slot_map_version <= VERSION_MAX):
                    refused.append((index, _refusal(target, length, slot_map_version)))
                    released += length
                    index += 1
                    continue
                flags = acks | slot_map_version << SLOT_MAP_SHIFT if has_slot_maps else acks
                if outbox.waiting or not write(_PRODUCE, slot, flags, word, ticket + index if ticket else 0, now_ns, (batch,)):
                    own = bytes(batch) if type(batch) is memoryview else batch  # a view would hold its whole frame
                    outbox.waiting.append(Batch(slot, flags, session, ticket + index if ticket else 0, now_ns, own))
                else:
                    released += length
                index += 1
        finally:
            # A client that waits for an answer hears of its credit there.
            raised = self._ledger.release(session.credit, released)
            if raised and (not ticket or len(raised) > 1 or raised[0] is not session.credit):
                self._replies.tell_credit(raised, session if ticket else None)
        return refused

    def _find_target(self, topic_id: bytes, partition: int) -> _Target | None:
        route = self._routing.find(topic_id, partition)
        if route is None:
            return None
        outbox = self._workers[route.worker].outbox
        lane, settings = outbox.lane, route.settings
        target = self._targets[topic_id, partition] = _Target(
            outbox, lane.try_write, route.slot, min(int(settings["max.message.bytes"]), lane.payload_max), bool(route.slot_counts),
            bool(route.delay_of) and not settings["delay.enabled"],
        )  # fmt: skip
        return target

    def _write(self, lane: LaneWriter, item: Batch) -> bool:
        """Copy a batch that has waited into its worker's lane; its credit is released."""
        batch = item.batch
        if not lane.try_write(LaneKind.PRODUCE, item.slot, item.flags, item.session.word, item.ticket, item.arrival_ns, (batch,)):
            return False
        self._replies.tell_credit(self._ledger.release(item.session.credit, len(batch)), item.session if item.ticket else None)
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
        if self._answered:
            self._send_answered()
        if settled:
            self._on_settled(settled)
        return count

    def _answer(self, answer: Answer) -> None:
        """To a batch. Nothing may be raised here: the walk over the ring would begin anew."""
        asked = self._tickets.find(answer.correlation_id)
        if asked is None:
            return
        if asked.body is None:
            self._answer_single(asked, answer)
            return
        _, ticket, code, base_offset, append_time_us, leader_epoch, is_duplicate = answer
        flags = requests.PRODUCED_DUPLICATE if is_duplicate else 0
        asked.settle(ticket & TICKET_INDEX_MASK, code, flags, leader_epoch, base_offset, append_time_us)
        if not asked.left:
            self._tickets.close(asked)
            self._answered.append(asked)

    def _send_answered(self) -> None:
        """The responses to all requests whose last batch was answered in this walk, one behind the other: the thread that sends them wakes up once."""
        answered, self._answered = self._answered, []
        for asked in answered:
            assert asked.body is not None
            self._replies.answer_late(asked.word, Api.PRODUCE, asked.version, asked.correlation_id, ErrorCode.OK, asked.body)

    def _answer_single(self, asked: Asked, answer: Answer) -> None:
        """Version 1."""
        self._tickets.close(asked)
        if answer.code is not ErrorCode.OK:
            body: Readable = orjson.dumps({"message": ERROR_TABLE[answer.code].meaning})
        else:
            flags = requests.PRODUCED_DUPLICATE if answer.is_duplicate else 0
            body = requests.encode_produced(requests.ProduceResponse(answer.base_offset, answer.append_time_us, answer.leader_epoch, flags))
        self._replies.answer_late(asked.word, Api.PRODUCE, asked.version, asked.correlation_id, answer.code, body)

    def next_deadline_ns(self) -> int:
        """When `answer_late` next has something to do."""
        return self._tickets.late_at_ns

    def answer_late(self, now_ns: int) -> int:
        """Requests whose timeout has passed: what is not answered of them may still be carried out, and their sender is told that it is not known yet."""
        late = self._tickets.take_late(now_ns)
        for asked in late:
            code, body = ErrorCode.OK, asked.body
            if body is None:
                code, body = ErrorCode.TIMED_OUT, bytearray(requests.encode_error("no answer within the request's timeout"))
            self._replies.answer_late(asked.word, Api.PRODUCE, asked.version, asked.correlation_id, code, body)
        return len(late)

    def forget(self, word: int, correlation_id: int) -> None:
        """The request was answered otherwise."""
        self._tickets.take(word, correlation_id)

    def forget_session(self, session: Session) -> None:
        """The client is gone; what it sent is appended all the same."""
        self._tickets.forget_session(session.word)

    def has_unanswered(self) -> bool:
        """Whether a client waits for an answer."""
        return len(self._tickets) > 0

    def has_more(self) -> bool:
        """Whether there is something to walk over."""
        return any(worker.acks.has_more() for worker in self._workers.values())

    def is_finished(self) -> bool:
        """Whether everything that came was passed on and answered."""
        return all(worker.outbox.is_empty() and worker.acks.is_caught_up() for worker in self._workers.values())


def _refusal(target: _Target, length: int, slot_map_version: int) -> ErrorCode:
    """Why a batch of this length, routed by this map, does not go there."""
    if length > target.bytes_max:
        return ErrorCode.RECORD_TOO_LARGE
    if target.refuses:
        return ErrorCode.DELAY_NOT_ENABLED
    is_routed = not target.has_slot_maps or 0 < slot_map_version <= VERSION_MAX
    return ErrorCode.UNSUPPORTED_BATCH if is_routed else ErrorCode.INVALID_REQUEST
