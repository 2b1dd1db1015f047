"""The buffer memory of a producer, and the callers that wait for it.

Owner: a Producer. `has_room` is called with the lock held, `wait` without it.
Invariants:
- Reserved memory never exceeds buffer_memory.
- Callers get memory in the order in which they began to wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tailrace.client.config.settings import ProducerSettings
from tailrace.client.connections.steps import Steps, Wait
from tailrace.core.errors import BufferExhaustedError, RecordTooLargeError
from tailrace.producer.batches.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.batches.producer_batch import BATCH_OVERHEAD_BYTES


class BufferPool:
    """Room for batches within the setting buffer_memory."""

    def __init__(
        self,
        settings: ProducerSettings,
        now_ns: Callable[[], int],
        accumulator: RecordAccumulator,
        flush: Callable[[], None],
        poll: Callable[[], None],
        wake_helper: Callable[[], None],
    ) -> None:
        """`flush` sends everything now. `poll` runs the sender once, and raises TailraceError if
        the producer has ended.
        """
        self._buffer_memory = settings.buffer_memory
        self._max_block_ms = settings.max_block_ms
        self._now_ns = now_ns
        self._accumulator = accumulator
        self._flush = flush
        self._poll = poll
        self._wake_helper = wake_helper
        self.waiters: deque[object] = deque()
        """Callers that wait, in their order."""

    def has_room(self, size: int) -> bool:
        """True if `size` bytes fit, and no caller waits."""
        return (
            not self.waiters
            and self._accumulator.buffered_bytes + size + BATCH_OVERHEAD_BYTES
            <= self._buffer_memory
        )

    def wait(self, size: int, start_ns: int) -> Steps[None]:
        """Wait until `size` bytes fit and earlier callers have gone on, for max_block_ms since
        `start_ns`. Raises BufferExhaustedError, RecordTooLargeError, and as `poll` does.
        """
        accumulator, memory = self._accumulator, self._buffer_memory
        if size + BATCH_OVERHEAD_BYTES > memory:
            raise RecordTooLargeError(
                f"{size} bytes cannot fit buffer_memory ({memory} bytes); raise buffer_memory"
            )
        deadline_ns = start_ns + self._max_block_ms * NS_PER_MS
        waiter = object()
        try:
            self.waiters.append(waiter)
            self._flush()
            while (
                self.waiters[0] is not waiter
                or accumulator.buffered_bytes + size + BATCH_OVERHEAD_BYTES > memory
            ):
                if self._now_ns() >= deadline_ns:
                    raise BufferExhaustedError(
                        f"buffer_memory ({memory} bytes) stayed full for {self._max_block_ms} ms "
                        "(max_block_ms); send more slowly, or raise one of them"
                    )
                yield Wait(deadline_ns)
                self._poll()
        finally:
            if waiter in self.waiters:
                self.waiters.remove(waiter)
            if self.waiters:
                self._wake_helper()  # the next may go on
