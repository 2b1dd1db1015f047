"""Acknowledgements: responses to PRODUCE requests, from the acks of their batches.

Owner: one front.

Invariants:
- A request is answered once, after the acks of all its batches or at its timeout (acks=0: never).
- The responses of a walk over the rings leave together.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson

from netfront.produce.pending_produces import TOKEN_INDEX_MASK, PendingProduce, PendingProduces
from netfront.produce.ring_acks import Answer
from netfront.session.responses import Responses
from netfront.session.sessions import Sessions
from shm.runtime.logs.slow_operations import SLOW
from shm.tables.measurements import Exemplars, Histogram
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.protocol import json_messages, produce_messages
from tailrace.protocol.frame import Api


class Acknowledgements:
    """Decisions of workers and flushers, on their way to the clients."""

    def __init__(
        self,
        pending: PendingProduces,
        sessions: Sessions,
        responses: Responses,
        durations: Histogram,
        exemplars: Exemplars,
        monotonic_ns: Callable[[], int],
        wall_us: Callable[[], int],
    ) -> None:
        """`durations`, `exemplars`, `wall_us`: see `ProduceService`."""
        self._pending_produces = pending
        self._sessions = sessions
        self._responses = responses
        self._durations = durations
        self._exemplars = exemplars
        self._monotonic_ns = monotonic_ns
        self._wall_us = wall_us
        self.answered: list[PendingProduce] = []
        """Requests whose last batch was acknowledged in this walk over the rings."""

    def answer(self, answer: Answer) -> None:
        """Record the ack of a batch.

        It must not raise: the walk over the ring would start again.
        """
        asked = self._pending_produces.find(answer.correlation_id)
        if asked is None:
            return
        if asked.body is None:
            self._answer_single(asked, answer)
            return
        _, batch_token, code, base_offset, append_time_us, leader_epoch, is_duplicate = answer
        if code is not ErrorCode.OK:
            asked.refused.append(code)
        flags = produce_messages.PRODUCED_DUPLICATE if is_duplicate else 0
        asked.settle(
            batch_token & TOKEN_INDEX_MASK, code, flags, leader_epoch, base_offset, append_time_us
        )
        if not asked.left:
            self._pending_produces.close(asked)
            self.answered.append(asked)

    def send_answered(self) -> None:
        """Send the responses of all requests completed in this walk together, so that the I/O
        thread wakes up once.
        """
        answered, self.answered = self.answered, []
        now_ns = self._monotonic_ns()
        for asked in answered:
            assert asked.body is not None
            self._note_end(asked, now_ns)
            if asked.trace_id:
                self._exemplars.store(now_ns - asked.opened_ns, asked.trace_id, self._wall_us())
            self._responses.answer_deferred(
                asked.word,
                Api.PRODUCE,
                asked.version,
                asked.correlation_id,
                ErrorCode.OK,
                asked.body,
            )

    def _answer_single(self, asked: PendingProduce, answer: Answer) -> None:
        """Answer a request of version 1."""
        self._note_end(asked, self._monotonic_ns())
        self._pending_produces.close(asked)
        if answer.code is not ErrorCode.OK:
            body: Readable = orjson.dumps({"message": ERROR_TABLE[answer.code].meaning})
        else:
            flags = produce_messages.PRODUCED_DUPLICATE if answer.is_duplicate else 0
            body = produce_messages.encode_produced(
                produce_messages.ProduceResponse(
                    answer.base_offset, answer.append_time_us, answer.leader_epoch, flags
                )
            )
        self._responses.answer_deferred(
            asked.word, Api.PRODUCE, asked.version, asked.correlation_id, answer.code, body
        )

    def _note_end(self, asked: PendingProduce, now_ns: int) -> None:
        """Measure a request, and log what was refused of it, and that it was slow."""
        duration_ns = now_ns - asked.opened_ns
        self._durations.add(duration_ns)
        if duration_ns > SLOW.limit_ns:
            self._responses.note_slow(asked.word, Api.PRODUCE, asked.correlation_id, duration_ns)
        if asked.refused:
            session = self._sessions.by_word(asked.word)
            if session is not None:
                self._responses.note_refused(
                    session, Api.PRODUCE, asked.correlation_id, asked.refused
                )

    def next_deadline_ns(self) -> int:
        """Return the time when `answer_expired` next has work."""
        return self._pending_produces.expires_at_ns

    def answer_expired(self, now_ns: int) -> int:
        """Answer requests whose timeout has passed. Batches without an ack are reported as timed
        out: they may still be appended.
        """
        late = self._pending_produces.pop_expired(now_ns)
        for asked in late:
            code, body = ErrorCode.OK, asked.body
            if body is None:
                code, body = (
                    ErrorCode.TIMED_OUT,
                    bytearray(json_messages.encode_error("no ack within the request's timeout")),
                )
            self._responses.answer_deferred(
                asked.word, Api.PRODUCE, asked.version, asked.correlation_id, code, body
            )
        return len(late)
