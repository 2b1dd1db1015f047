"""Acks of produce requests, read with two cursors over each worker's ring.

Acks of acks=1 and every refusal are sent up to `producer_position`. Acks of acks=all are sent up to
`settled`, each with its verdict. Requests of other fronts, of an earlier generation, and with
acks=0 are skipped.

Owner: the front. In shared memory: its cursor in each ring, which retains descriptors that it has
not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shm.memory.atomic_word import AtomicCounter, compiled_variant_of, new
from shm.memory.layout import ACKS_ALL, ACKS_LEADER, Verdict
from shm.queues.ring import Descriptor, Ring
from tailrace import kernel
from tailrace.core.error_codes import ErrorCode, code_of


class Answer(NamedTuple):
    """Ack of one batch, with the session and correlation id that it goes to."""

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
    """The two cursors of one front in one ring."""

    def __new__(cls, ring: Ring, *_: int) -> Any:
        """Return the compiled variant for a compiled ring."""
        return new(cls, kernel.compiled is not None and isinstance(ring, kernel.compiled.Ring))

    def __init__(self, ring: Ring, front: int, generation: int) -> None:
        self._ring = ring
        self._front = front
        self._generation = generation
        self._producer_cursor = self._settled_cursor = ring.producer_position.load()
        self._published: AtomicCounter = ring.cursors[front]
        self._published.store(self._settled_cursor)

    def _is_mine(self, descriptor: Descriptor) -> bool:
        return (
            descriptor.source_lane == self._front and descriptor.session >> 32 == self._generation
        )

    def walk(self, answer: Callable[[Answer], None], settled_slots: set[int]) -> int:
        """Pass every new ack to `answer` and add the slots with settled descriptors to
        `settled_slots`.

        Return the number of descriptors passed.
        """
        ring = self._ring
        # SYNC POINT: settled; read before producer_position, so that it never passes that cursor
        settled = ring.settled.load()
        # SYNC POINT: producer_position
        producer_position = min(ring.producer_position.load(), self._producer_cursor + LIMIT)
        count = producer_position - self._producer_cursor
        for number in range(self._producer_cursor, producer_position):
            d = ring.descriptor(number)
            acks = d.acks
            if (acks == ACKS_LEADER or (d.result and acks == ACKS_ALL)) and self._is_mine(d):
                answer(
                    Answer(
                        d.session,
                        d.correlation_id,
                        code_of(d.result),
                        d.base_offset,
                        d.append_time_us,
                        d.leader_epoch,
                        d.is_duplicate,
                    )
                )
        self._producer_cursor = producer_position
        settled = min(settled, producer_position)
        for number in range(self._settled_cursor, settled):
            d = ring.descriptor(number)
            if d.has_bytes:
                settled_slots.add(d.slot)
            if d.acks == ACKS_ALL and not d.result and self._is_mine(d):
                code = _code_of_verdict(ring.outcome(number).verdict)
                answer(
                    Answer(
                        d.session,
                        d.correlation_id,
                        code,
                        d.base_offset,
                        d.append_time_us,
                        d.leader_epoch,
                        d.is_duplicate,
                    )
                )
        if settled > self._settled_cursor:
            count += settled - self._settled_cursor
            self._settled_cursor = settled
            self._published.store(settled)  # SYNC POINT: cursor (everything before it was read)
        return count

    def has_more(self) -> bool:
        """True if the ring has descriptors to walk over."""
        return (
            self._producer_cursor != self._ring.producer_position.load()
            or self._settled_cursor < min(self._ring.settled.load(), self._producer_cursor)
        )

    def is_caught_up(self) -> bool:
        """True if everything in the ring is settled and walked over."""
        return self._settled_cursor == self._ring.producer_position.load()


if kernel.compiled is not None:

    @compiled_variant_of(AckWalker)
    class _CompiledAckWalker(kernel.compiled.AckWalker, AckWalker):  # type: ignore[misc]
        def __init__(self, ring: Ring, front: int, generation: int) -> None:
            AckWalker.__init__(self, ring, front, generation)
            self._begin(ring, LIMIT, Answer, code_of, _code_of_verdict)
