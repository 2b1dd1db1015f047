"""Answers to produce requests: two cursors over each worker's ring.

Up to `head` go the answers to acks=1 and every refusal, up to `settled` those to acks=all, each with its verdict. Requests of other fronts, of an
earlier generation, and with acks=0 are stepped over.

Owner: the front; in shared memory its cursor in each ring, which holds back what it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shm.cell import Cell, is_twin_of, new
from shm.layout import ACKS_ALL, ACKS_LEADER, Verdict
from shm.ring import Descriptor, Ring
from tailrace import kernel
from tailrace.protocol.errors import ErrorCode, code_of


class Answer(NamedTuple):
    """What to tell whom."""

    session: int
    correlation_id: int
    code: ErrorCode
    base_offset: int
    append_time_us: int
    leader_epoch: int
    is_duplicate: bool


_CODE_OF_VERDICT = {
    Verdict.DURABLE: ErrorCode.OK,
    Verdict.WRITTEN: ErrorCode.OK,
    Verdict.FAILED: ErrorCode.STORAGE_ERROR,
    Verdict.DELETED: ErrorCode.UNKNOWN_TOPIC,
}
LIMIT = 4096


def _code_of_verdict(verdict: int) -> ErrorCode:
    return _CODE_OF_VERDICT.get(Verdict(verdict), ErrorCode.INTERNAL_ERROR)


class AckWalker:
    """The two cursors in one ring."""

    def __new__(cls, ring: Ring, *_: int) -> Any:
        """One whose walk is compiled, for a ring that is."""
        return new(cls, kernel.compiled is not None and isinstance(ring, kernel.compiled.Ring))

    def __init__(self, ring: Ring, front: int, generation: int) -> None:
        self._ring = ring
        self._front = front
        self._generation = generation
        self._head_cursor = self._settled_cursor = ring.head.load()
        self._published: Cell = ring.cursors[front]
        self._published.store(self._settled_cursor)

    def _is_mine(self, descriptor: Descriptor) -> bool:
        return descriptor.source_lane == self._front and descriptor.session >> 32 == self._generation

    def walk(self, answer: Callable[[Answer], None], settled_slots: set[int]) -> int:
        """Give every new answer to `answer`, add the slots that something settled in to `settled_slots`; returns how many descriptors
        were passed.
        """
        ring = self._ring
        settled = ring.settled.load()  # SYNC POINT: settled; read before head, so that it never passes the head cursor
        head = min(ring.head.load(), self._head_cursor + LIMIT)  # SYNC POINT: head
        count = head - self._head_cursor
        for number in range(self._head_cursor, head):
            d = ring.descriptor(number)
            acks = d.acks
            if (acks == ACKS_LEADER or (d.result and acks == ACKS_ALL)) and self._is_mine(d):
                answer(
                    Answer(d.session, d.correlation_id, code_of(d.result), d.base_offset, d.append_time_us, d.leader_epoch, d.is_duplicate)
                )
        self._head_cursor = head
        settled = min(settled, head)
        for number in range(self._settled_cursor, settled):
            d = ring.descriptor(number)
            if d.has_bytes:
                settled_slots.add(d.slot)
            if d.acks == ACKS_ALL and not d.result and self._is_mine(d):
                code = _code_of_verdict(ring.outcome(number).verdict)
                answer(Answer(d.session, d.correlation_id, code, d.base_offset, d.append_time_us, d.leader_epoch, d.is_duplicate))
        if settled > self._settled_cursor:
            count += settled - self._settled_cursor
            self._settled_cursor = settled
            self._published.store(settled)  # SYNC POINT: cursor (everything before it was read)
        return count

    def has_more(self) -> bool:
        """Whether there is something to walk over."""
        return self._head_cursor != self._ring.head.load() or self._settled_cursor < min(self._ring.settled.load(), self._head_cursor)

    def is_caught_up(self) -> bool:
        """Whether everything in the ring is settled and walked over."""
        return self._settled_cursor == self._ring.head.load()


if kernel.compiled is not None:

    @is_twin_of(AckWalker)
    class _CompiledAckWalker(kernel.compiled.AckWalker, AckWalker):  # type: ignore[misc]
        def __init__(self, ring: Ring, front: int, generation: int) -> None:
            AckWalker.__init__(self, ring, front, generation)
            self._begin(ring, LIMIT, Answer, code_of, _code_of_verdict)
