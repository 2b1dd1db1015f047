"""Produce service: passes batches to the workers, and walks their rings for the acks.

Owner: one front. In shared memory: the tails of its lanes to the workers, and its cursor in each
ring.

Invariants:
- A connection's batches reach their worker in the order of arrival.
- A request that is malformed or beyond its credit leaves nothing in a lane.
- A batch's credit is released when it is written to its lane or refused.
- With users the batches of a transaction are taken only from the user whose transaction it is.
- A batch that waits for lane space holds only its own bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from netfront.partition_routes import PartitionRoutes
from netfront.produce.acknowledgements import Acknowledgements
from netfront.produce.append_targets import AppendTargets, refusal_code
from netfront.produce.pending_produces import PendingProduce, PendingProduces
from netfront.produce.worker_link import ConnectedWorker, WaitingBatch, WorkerLink
from netfront.session.responses import Responses
from netfront.session.sessions import Session, Sessions
from netfront.socket.flow_control import CreditLedger
from shm.memory.layout import ACKS_ALL, ACKS_LEADER, ACKS_NONE, SLOT_MAP_SHIFT
from shm.messages.lane_messages import LaneKind
from shm.queues.lane import LaneWriter
from shm.queues.outbox import Outbox
from shm.tables.measurements import Exemplars, Histogram
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.core.hash_slots import VERSION_MAX
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.batch_header import (
    HEADER_BYTES,
    OFFSET_PRODUCER,
    TRANSACTIONAL_PRODUCER_IDS,
    header_position,
)
from tailrace.kernel import read_produce
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import Api, RequestHeader, WireError

if TYPE_CHECKING:
    from netfront.access.producer_owners import ProducerOwners
    from shm.rights.authorizer import Principal

SESSION_PRODUCES_MAX = 32_768
PRODUCES_MAX = 131_072
"""Batches that wait for acks, of one connection and of all. Five in flight to each of 4,096
partitions are 20,480.
"""
OVERDRAFT_BYTES = 1 << 20
NO_SLOT_MAP = (
    "this client is too old for topics with partitioner=hash_slots: upgrade it, or use a topic "
    "with partitioner=producer"
)
_PRODUCE = int(LaneKind.PRODUCE)
_PRODUCE_OWNED = int(LaneKind.PRODUCE_OWNED)
_PRODUCER = struct.Struct("<q")


class ProduceService:
    """PRODUCE requests, from arrival to response."""

    def __init__(
        self,
        *,
        workers: dict[int, WorkerLink],
        connect_worker: Callable[[int], WorkerLink],
        routing: PartitionRoutes,
        ledger: CreditLedger,
        sessions: Sessions,
        responses: Responses,
        on_settled: Callable[[set[int]], None],
        start_ns: int,
        durations: Histogram,
        exemplars: Exemplars,
        monotonic_ns: Callable[[], int],
        wall_us: Callable[[], int],
    ) -> None:
        """`on_settled` is called with the table slots whose watermarks may have moved. `durations`
        counts from the receipt of a request to its response, and `exemplars` has traces of these.
        `wall_us`: microseconds since 1970.
        """
        self._workers = {number: self._reached(link) for number, link in workers.items()}
        self._connect_worker = connect_worker
        self._routing = routing
        self._ledger = ledger
        self._responses = responses
        self._on_settled = on_settled
        self._pending_produces = PendingProduces(SESSION_PRODUCES_MAX, PRODUCES_MAX)
        """Requests with batches that a worker has."""
        self._targets = AppendTargets(routing, self._workers)
        self.on_access: Callable[[Session, str, list[bytes]], None] | None = None
        """Gets the topics that a worker got batches for, where writing is audited."""
        self.owners: ProducerOwners | None = None
        """Owners of transactional producer ids, where the appliance has users."""
        self.acknowledgements = Acknowledgements(
            self._pending_produces, sessions, responses, durations, exemplars, monotonic_ns, wall_us
        )
        self.now_ns = start_ns
        """Time of this loop step. The front sets it."""

    def _reached(self, link: WorkerLink) -> ConnectedWorker:
        return ConnectedWorker(
            Outbox(link.lane, link.bell, partial(self._write, link.lane)), link.ring, link.acks
        )

    def reach(self, worker: int) -> None:
        """Connect to a worker unless it is connected. A dedicated worker starts after the front."""
        if worker not in self._workers:
            self._workers[worker] = self._reached(self._connect_worker(worker))

    def block(self, topic_ids: frozenset[bytes]) -> None:
        """Refuse batches for these topics and delay logs, and for no others."""
        self._targets.block(topic_ids)

    # ---- in --------------------------------------------------------------------------------------

    def take(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Serve a PRODUCE request. Raises WireError, which the caller sends as the response."""
        entries: Sequence[tuple[bytes, int, int, int]]
        batches: Sequence[Readable]
        trace_id = b""
        if header.version == 1:
            if len(body) != 2:
                raise WireError(
                    ErrorCode.MALFORMED_REQUEST,
                    f"PRODUCE of version 1 takes two body frames; the request has {len(body)}",
                )
            topic_id, partition, acks, timeout_ms, slot_map_version = (
                produce_messages.decode_produce(body[0])
            )
            batches = body[1:]
            entries = [(topic_id, partition, slot_map_version, len(body[1]))]
        else:
            if not body:
                raise WireError(
                    ErrorCode.MALFORMED_REQUEST,
                    "PRODUCE takes a frame of entries and frames of batches; the request has none",
                )
            acks, timeout_ms, entries, trace_id = produce_messages.decode_produce_batches(
                body[0], header.version
            )
            batches = produce_messages.cut_batches(entries, body[1:])
        self.receive_read(
            session,
            header.version,
            header.correlation_id,
            acks,
            timeout_ms,
            entries,
            batches,
            header.body_length - len(body[0]),
            trace_id,
        )

    def receive_plain(self, session: Session, frames: list[bytes]) -> bool:
        """Fast path: serve a request that the kernel can decode. Return False, with nothing done,
        for any other request.
        """
        read = read_produce(frames)
        if read is None:
            return False
        try:
            self.receive_read(session, *read)
        except WireError as error:
            self._responses.refuse(session.identity, session, Api.PRODUCE, read[0], read[1], error)
        except Exception as error:
            self.forget(session.word, read[1])
            self._responses.fail(session.identity, session, Api.PRODUCE, read[0], read[1], error)
        return True

    def receive_read(
        self, session: Session, version: int, correlation_id: int, acks: int, timeout_ms: int,
        entries: Sequence[tuple[bytes, int, int, int]],
        batches: Sequence[Readable], byte_count: int, trace_id: bytes = b"",
    ) -> None:  # fmt: skip
        """Serve a decoded request. Its batch frames have `byte_count` bytes. `trace_id`: empty, or
        a trace that a record belongs to. Raises WireError, which the caller sends as the response.
        """
        self._receive(session, byte_count)
        if not acks:
            refused = self._pass(session, ACKS_NONE, 0, entries, batches)
            if self.on_access is not None:
                self._report_access(self.on_access, session, entries, refused)
            return
        word = session.word
        refusal = self._pending_produces.refusal(word, correlation_id, len(entries))
        if refusal is not None:
            self._responses.send_credit(self._ledger.release(session.credit, byte_count), session)
            raise refusal
        asked = self._pending_produces.open(
            word, correlation_id, version, len(entries), self.now_ns, timeout_ms
        )
        if trace_id:
            asked.trace_id = trace_id
        refused = self._pass(
            session, ACKS_LEADER if acks == 1 else ACKS_ALL, asked.batch_token, entries, batches
        )
        if self.on_access is not None:
            self._report_access(self.on_access, session, entries, refused)
        if refused:
            self._answer_refused(session, asked, refused)

    @staticmethod
    def _report_access(
        report: Callable[[Session, str, list[bytes]], None], session: Session,
        entries: Sequence[tuple[bytes, int, int, int]], refused: list[tuple[int, ErrorCode]],
    ) -> None:  # fmt: skip
        refused_at = {index for index, _ in refused}
        written = [entry[0] for index, entry in enumerate(entries) if index not in refused_at]
        report(session, "write", written)

    def _answer_refused(
        self, session: Session, asked: PendingProduce, refused: list[tuple[int, ErrorCode]]
    ) -> None:
        """Answer for the batches of a request that no worker got."""
        if asked.body is None:
            self._pending_produces.close(asked)
            code = refused[0][1]
            raise WireError(
                code,
                NO_SLOT_MAP if code is ErrorCode.INVALID_REQUEST else ERROR_TABLE[code].meaning,
            )
        self._responses.note_refused(
            session, Api.PRODUCE, asked.correlation_id, [code for _, code in refused]
        )
        for index, code in refused:
            asked.settle(index, code)
        if not asked.left:
            self._pending_produces.close(asked)
            self._responses.send(
                session,
                Api.PRODUCE,
                asked.version,
                asked.correlation_id,
                ErrorCode.OK,
                [asked.body],
            )

    def _receive(self, session: Session, byte_count: int) -> None:
        """Count the bytes of a request's batches against its credit. Raises WireError."""
        credit = session.credit
        if not self._ledger.receive(credit, byte_count) and (
            credit.received > credit.granted + OVERDRAFT_BYTES or not self._ledger.has_room()
        ):
            received = credit.received
            self._responses.send_credit(self._ledger.release(credit, byte_count), session)
            raise WireError(
                ErrorCode.CREDIT_EXCEEDED,
                f"the connection has sent {received} bytes of batches; its credit is "
                f"{credit.limit}. Wait for CREDIT before sending more",
            )

    def _pass(
        self,
        session: Session,
        acks: int,
        batch_token: int,
        entries: Sequence[tuple[bytes, int, int, int]],
        batches: Sequence[Readable],
    ) -> list[tuple[int, ErrorCode]]:
        """Write each batch to its worker's lane. Return (index, error code) of those that are
        refused.

        `batch_token` is the token of the first batch.
        """
        principal, targets = session.principal, self._targets
        find_target = targets.known(principal).get
        barred = None if principal is None else self._barred(principal, batches)
        word, now_ns = session.word, self.now_ns
        refused: list[tuple[int, ErrorCode]] = []
        released = index = 0
        try:
            for (topic_id, partition, slot_map_version, length), batch in zip(
                entries, batches, strict=True
            ):
                code = ErrorCode.OK
                target = find_target((topic_id, partition)) or targets.find(
                    topic_id, partition, principal
                )
                if target is None:
                    code = targets.refusal(topic_id, principal)
                elif barred and index in barred:
                    code = barred[index]
                else:
                    outbox, write, slot, bytes_max, has_slot_maps, refuses, owner = target
                    if (
                        length > bytes_max
                        or length <= HEADER_BYTES
                        or refuses
                        or (has_slot_maps and not 0 < slot_map_version <= VERSION_MAX)
                    ):
                        code = refusal_code(target, length, slot_map_version)
                if code:
                    refused.append((index, code))
                    released += length
                    index += 1
                    continue
                flags = acks | slot_map_version << SLOT_MAP_SHIFT if has_slot_maps else acks
                token = batch_token + index if batch_token else 0
                kind = _PRODUCE
                if owner and (owned := _stamped(batch, topic_id, partition, owner)) is not None:
                    kind, batch = _PRODUCE_OWNED, owned
                if outbox.waiting or not write(kind, slot, flags, word, token, now_ns, (batch,)):
                    # a memoryview would keep its whole frame alive
                    own = bytes(batch) if type(batch) is memoryview else batch
                    outbox.waiting.append(
                        WaitingBatch(kind, slot, flags, session, token, now_ns, own)
                    )
                else:
                    released += length
                index += 1
        finally:
            # A client that waits for a response gets its new credit with it.
            raised = self._ledger.release(session.credit, released)
            if raised and (not batch_token or len(raised) > 1 or raised[0] is not session.credit):
                self._responses.send_credit(raised, session if batch_token else None)
        return refused

    def _barred(
        self, principal: Principal, batches: Sequence[Readable]
    ) -> dict[int, ErrorCode] | None:
        """Error codes by index of the batches of transactions that the principal may not write in,
        or whose owner is not known yet.
        """
        found: dict[int, ErrorCode] | None = None
        for index, batch in enumerate(batches):
            producer_id = _transactional_producer(batch)
            if producer_id and self.owners is not None:
                code = self.owners.refusal(principal, producer_id)
                if code is not ErrorCode.OK:
                    found = found or {}
                    found[index] = code
        return found

    def _write(self, lane: LaneWriter, item: WaitingBatch) -> bool:
        """Write a waiting batch to its worker's lane and release its credit."""
        batch = item.batch
        if not lane.try_write(
            item.kind,
            item.slot,
            item.flags,
            item.session.word,
            item.batch_token,
            item.arrival_ns,
            (batch,),
        ):
            return False
        self._responses.send_credit(
            self._ledger.release(item.session.credit, len(batch)),
            item.session if item.batch_token else None,
        )
        return True

    def pass_on(self) -> int:
        """Write waiting batches to the lanes, commit, and ring each worker once."""
        count = 0
        for worker in self._workers.values():
            count += worker.outbox.flush()
        return count

    # ---- out -------------------------------------------------------------------------------------

    def walk_rings(self) -> int:
        """Send the acks that workers and flushers have decided since the last walk."""
        count = 0
        settled: set[int] = set()
        for worker in self._workers.values():
            passed = worker.acks.walk(self.acknowledgements.answer, settled)
            if passed and worker.ring.is_crowded():
                worker.outbox.bell.ring()
            count += passed
        if self.acknowledgements.answered:
            self.acknowledgements.send_answered()
        if settled:
            self._on_settled(settled)
        return count

    def forget(self, word: int, correlation_id: int) -> None:
        """Remove a request that was answered by other means."""
        self._pending_produces.take(word, correlation_id)

    def forget_session(self, session: Session) -> None:
        """Remove the requests of a session that has ended. Its batches are still appended."""
        self._pending_produces.forget_session(session.word)

    def has_unanswered(self) -> bool:
        """True if a client waits for an ack."""
        return len(self._pending_produces) > 0

    def has_more(self) -> bool:
        """True if a ring has descriptors to walk over."""
        return any(worker.acks.has_more() for worker in self._workers.values())

    def is_finished(self) -> bool:
        """True if every batch has been passed on and acknowledged."""
        return all(
            worker.outbox.is_empty() and worker.acks.is_caught_up()
            for worker in self._workers.values()
        )


def _stamped(batch: Readable, topic_id: bytes, partition: int, owner: int) -> Readable | None:
    """A batch for a delay log with its owner, None if its worker will refuse it."""
    from netfront.access.delay_owners import stamped

    return stamped(batch, topic_id, partition, owner)


def _transactional_producer(batch: Readable) -> int:
    """The producer id of a batch of a transaction, 0 for another batch. The worker refuses a batch
    whose header is elsewhere.
    """
    if len(batch) <= HEADER_BYTES:
        return 0
    position = header_position(batch)
    if not 0 <= position <= len(batch) - HEADER_BYTES:
        return 0
    producer_id = int(_PRODUCER.unpack_from(batch, position + OFFSET_PRODUCER)[0])
    return producer_id if producer_id >= TRANSACTIONAL_PRODUCER_IDS else 0
