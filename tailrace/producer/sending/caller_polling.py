"""Sends and polls the socket from the threads that append records.

A response may let the next request be sent, so it is handled at once. The helper thread, which
sleeps on the socket, handles it, or a caller that waits for a response and sleeps there itself. A
caller that never sleeps keeps the interpreter's lock. The helper thread would get it only after
`sys.getswitchinterval()`, 5 ms, and interrupt the caller for every response. So an appending caller
polls the socket itself every POLL_INTERVAL_NS. An open batch reserves memory in pieces that last
about that long, and the caller polls with each piece. The helper thread leaves responses to callers
that poll and run all the time, by their CPU clock.

Owner: a Producer, under its lock.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import thread_time_ns

from tailrace.producer.batches.accumulator import NS_PER_MS, RESERVE_BYTES, RecordAccumulator
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.sending.sender import Sender

CALLER_IS_ACTIVE_NS = 3 * NS_PER_MS
"""The helper thread leaves responses to a caller for this time after the caller's last poll."""
POLL_INTERVAL_NS = 200_000
PIECE_MIN_BYTES = 512


class CallerPolling:
    """The calls that an appending thread makes, and their times."""

    def __init__(
        self,
        now_ns: Callable[[], int],
        accumulator: RecordAccumulator,
        sender: Sender,
        run_once: Callable[..., None],
        wake_helper_at: Callable[[int], None],
    ) -> None:
        """`run_once`: of the SenderThread. `wake_helper_at`: has the helper thread wake up at that
        time at the latest.
        """
        self._now_ns = now_ns
        self._accumulator = accumulator
        self._sender = sender
        self._run_once = run_once
        self._wake_helper_at = wake_helper_at
        self.polled_ns = 0
        """Time of the last poll of the socket, by any thread."""
        self.until_ns = 0
        """The helper thread leaves responses to callers until this time."""
        self.helper_wakes_ns = 0
        """Time when the helper thread wakes up."""
        self.helper_listens = True
        """True if a response wakes the helper thread."""
        self._piece_ns = 0
        """Time when a batch last reserved a piece of memory."""
        self._running = 0, 0, 0
        """(thread, its CPU time, the time) of the caller that polled last."""

    def on_batch_opened(self, queue: PartitionQueue) -> None:
        """A caller opened a batch. Send it if linger is 0, else have the helper thread send it."""
        if queue.is_due:
            if self._sender.may_send_unfilled:
                self._run_once(sends_first=True)
            self.leave_responses()
        elif (ends_ns := self._accumulator.first_linger_ns()) is not None:
            self._wake_helper_at(ends_ns)

    def leave_responses(self) -> None:
        """A caller does not wait, or not any more: have the helper thread handle the responses."""
        if not self.helper_listens and self._accumulator.incomplete_count:
            self._wake_helper_at(self.until_ns)

    def begin_piece(self) -> None:
        """An opened batch is about to reserve its first piece of memory."""
        self._piece_ns = self._now_ns()

    def poll_while_appending(self) -> None:
        """An open batch is about to reserve another piece of memory. Adapt the size of pieces, and
        poll if it is time.
        """
        now_ns = self._now_ns()
        accumulator = self._accumulator
        since_ns = now_ns - self._piece_ns
        self._piece_ns = now_ns
        if since_ns < POLL_INTERVAL_NS // 2:
            accumulator.piece_bytes = min(RESERVE_BYTES, accumulator.piece_bytes * 2)
        elif since_ns > POLL_INTERVAL_NS * 2:
            accumulator.piece_bytes = max(PIECE_MIN_BYTES, accumulator.piece_bytes // 2)
        if accumulator.in_flight_count and now_ns - self.polled_ns >= POLL_INTERVAL_NS // 2:
            self._note_running(now_ns)
            self._run_once()

    def on_batch_full(self, queue: PartitionQueue) -> None:
        """A caller filled a batch. Send it if it may be sent, else encode it. Poll if it is
        time.
        """
        now_ns = self._now_ns()
        self._note_running(now_ns)
        if self._sender.may_leave(queue) or now_ns - self.polled_ns >= POLL_INTERVAL_NS // 2:
            self._run_once()
        if queue.ready:
            self._sender.encode_ahead(queue)
        self.leave_responses()

    def _note_running(self, now_ns: int) -> None:
        """Take responses from the helper thread if this caller runs all the time."""
        thread, then_cpu_ns, then_ns = self._running
        cpu_ns = thread_time_ns()
        self._running = get_ident(), cpu_ns, now_ns
        if thread == self._running[0] and (cpu_ns - then_cpu_ns) * 4 > (now_ns - then_ns) * 3:
            self.until_ns = now_ns + CALLER_IS_ACTIVE_NS
