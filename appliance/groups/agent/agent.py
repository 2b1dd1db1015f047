"""The agent of groups: runs the group service between the lanes of fronts and controller.

A step reads the lanes, handles each request in memory and in one open transaction, commits once,
and then sends the answers and pushes (`transaction`). It is a group commit: the more requests a
step has, the fewer syncs each of them costs.

Owner: groups.db in the first data directory; in shared memory the producer positions of its lanes
    to the fronts. It waits on its doorbell until the service's next timer.
Invariants:
- A request is consumed before it is handled, so that a request that fails is not read again.
- No session times out while an earlier message waits in a lane, nor within RESUMED_NS after the
  process was suspended, since the silence was not its members'.
Bounds:
- A step reads at most REQUESTS_AT_ONCE requests of a front, and stops after READING_NS.
- A front with ANSWERS_MAX unsent answers is not read.
Crash: a successor reads the database. Requests without an answer are answered by their fronts,
    which notice the new process. Sessions of a killed front end when its successor appears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from appliance.groups.agent.front_link import FrontLink, Outgoing
from appliance.groups.agent.transaction import AFTER_FAILURE_NS, Opened, Request, StepTransaction
from appliance.groups.agent.transaction_lanes import TransactionLanes
from appliance.groups.base.messages import Push, Requester, SessionKey
from appliance.groups.base.topic_image import CatalogTopicImage
from shm.crash_points import crash_point
from shm.memory.layout import ProcessWord
from shm.messages.lane_messages import Assignment, LaneKind
from shm.queues.lane import LaneReader
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.control import ProcessSlot
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api, WireError
from tailrace.protocol.json_messages import decode_json, encode_error

REQUESTS_AT_ONCE = 256
READING_NS = 50_000_000
"""Time after which a step commits before it reads on. A list of a large group takes some
milliseconds.
"""
ANSWERS_MAX = 1_024
PUSHES_MAX = 16_384
"""Limit of unsent messages of a front, above which pushes are dropped. A lost push is harmless."""
RETRY_INTERVAL_NS = 20_000_000
"""Interval between attempts to write to a full lane."""
SUSPENDED_NS = 500_000_000
"""Delay of a step that shows that the process was stopped or waited for a disk."""
RESUMED_NS = 1_000_000_000
"""Pause of timers after a suspension, since messages of that time are still on their way."""


class GroupsAgent:
    """An agent (see `shm.runtime.agent_runner`)."""

    def __init__(
        self,
        *,
        open_service: Callable[[CatalogTopicImage, int], Opened],
        topics: CatalogTopicImage,
        from_controller: LaneReader,
        fronts: list[FrontLink],
        generation: int,
        slot: ProcessSlot,
        error_handler: CountedErrorHandler,
        is_running: Callable[[], bool],
        on_ready: Callable[[], None],
        monotonic_ns: Callable[[], int],
        start_ns: int,
        transactions: TransactionLanes | None = None,
        take_limits: Callable[[Mapping[str, Any]], None] = lambda _settings: None,
    ) -> None:
        """`open_service`: opens the store and the service over it, with the topics and the current
        time; raises TailraceError when the database cannot be used. `transactions`: the lanes of
        its transaction coordinator. `take_limits`: gives changed settings to what has limits.
        """
        self._topics = topics
        self._from_controller = from_controller
        self._fronts = fronts
        self._generation = generation
        self._slot = slot
        self._error_handler = error_handler
        self._transactions = transactions
        self._take_limits = take_limits
        self._is_running = is_running
        self._on_ready = on_ready
        self._monotonic_ns = monotonic_ns
        self._now_ns = start_ns
        self._is_fed = False
        self._has_topic_changes = False
        """Topics have changed since the last `Service.topics_changed`."""
        self._topics_at_ns = start_ns
        """Earliest time of the next `Service.topics_changed`, after a failure."""
        self._due_ns: int | None = None
        """Deadline of the next step, as `next_deadline_ns` returned it."""
        self._transaction = StepTransaction(
            partial(open_service, topics), slot, error_handler, self._answer, self._push, start_ns
        )

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings of the appliance."""
        self._take_limits(settings)
        if self._transaction.service is not None:
            self._transaction.service.limits_changed()

    # ---- agent -----------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        """Read the lanes, run timers, commit, send answers. Returns the amount of work."""
        self._now_ns = now_ns
        transaction = self._transaction
        transaction.begin_step(now_ns)
        if self._due_ns is not None and now_ns - self._due_ns >= SUSPENDED_NS:
            transaction.timers_at_ns = max(transaction.timers_at_ns, now_ns + RESUMED_NS)
        self._due_ns = None
        work = self._read_controller()
        if not self._is_fed or not self._is_running():
            return work
        if (
            transaction.service is None
            and now_ns >= transaction.open_at_ns
            and transaction.try_open()
        ):
            self._has_topic_changes = False
        self._report_topic_changes()
        if self._transactions is not None and transaction.service is not None:
            work += self._transactions.read(now_ns)
        read_until_ns = self._monotonic_ns() + READING_NS
        for front in self._fronts:
            work += self._read_front(front, read_until_ns)
        if transaction.service is not None and now_ns >= transaction.timers_at_ns:
            transaction.guarded(
                "timers", transaction.service.step, now_ns, self._last_received_ns()
            )
        transaction.commit()
        self._due_ns = now_ns  # the next step follows at once unless the process sleeps
        if self._transactions is not None:
            work += self._transactions.flush()  # before the answers: workers know what they say
        return work + sum(front.outbox.flush() for front in self._fronts)

    def _report_topic_changes(self) -> None:
        """Call `Service.topics_changed` if topics have changed."""
        now_ns, service = self._now_ns, self._transaction.service
        if service is not None and self._has_topic_changes and now_ns >= self._topics_at_ns:
            self._has_topic_changes = not self._transaction.guarded(
                "topics_changed", service.topics_changed, now_ns
            )
            self._topics_at_ns = now_ns + AFTER_FAILURE_NS if self._has_topic_changes else now_ns

    def _last_received_ns(self) -> int:
        """Arrival time up to which all messages were read, without fronts that take no answers."""
        waiting = [
            front.requests.peek()
            for front in self._fronts
            if len(front.outbox.waiting) < ANSWERS_MAX
        ]
        return min(
            (message.arrival_ns for message in waiting if message is not None), default=self._now_ns
        )

    def has_more(self) -> bool:
        """True when the next step has work at once."""
        if self._transactions is not None and self._transactions.has_more():
            return self._transaction.service is not None
        return any(
            front.requests.has_more() and len(front.outbox.waiting) < ANSWERS_MAX
            for front in self._fronts
        )

    def next_deadline_ns(self) -> int | None:
        """Time of the next step's work unless the doorbell rings before."""
        deadlines = []
        transaction = self._transaction
        if transaction.service is not None:
            timer_ns = transaction.service.next_deadline_ns()
            if timer_ns is not None:
                deadlines.append(max(timer_ns, transaction.timers_at_ns))
            if self._has_topic_changes:
                deadlines.append(self._topics_at_ns)
        elif self._is_fed and self._is_running():  # the end of recovery rings the doorbell
            deadlines.append(transaction.open_at_ns)
        if any(front.outbox.waiting or front.is_replaced for front in self._fronts) or (
            self._transactions is not None and self._transactions.has_unsent
        ):
            deadlines.append(self._now_ns + RETRY_INTERVAL_NS)
        self._due_ns = min(deadlines, default=None)
        return self._due_ns

    def begin_stop(self) -> None:
        """Do nothing: each step ends with its commit."""

    def is_finished(self) -> bool:
        return True

    def close(self) -> None:
        """Close the database."""
        self._transaction.close()

    # ---- lanes -----------------------------------------------------------------------------------

    def _read_controller(self) -> int:
        lane = self._from_controller
        count = 0
        while (message := lane.peek()) is not None:
            kind, correlation_id, session, payload = (
                message.kind,
                message.correlation_id,
                message.session,
                bytes(message.payload),
            )
            lane.advance(message)
            lane.consume()
            count += 1
            if kind == LaneKind.PRODUCER_IDS:
                if self._transactions is not None:
                    self._transactions.take_producer_ids(correlation_id, session)
            elif kind == LaneKind.ASSIGN:
                try:
                    self._has_topic_changes = (
                        self._topics.apply(Assignment.decode(payload)) or self._has_topic_changes
                    )
                except Exception as error:
                    self._error_handler.on_error("message=assignment", error)
            elif kind == LaneKind.FED and correlation_id == self._generation and not self._is_fed:
                self._is_fed = True
                self._on_ready()
        return count

    def _read_front(self, front: FrontLink, until_ns: int) -> int:
        """Read messages of a front: at least one, so that a busy front does not starve others."""
        process = front.process_generation()
        if process != front.known_process:
            front.known_process, front.is_replaced = process, True
        lane = front.requests
        count = 0
        while (
            count < REQUESTS_AT_ONCE
            and len(front.outbox.waiting) < ANSWERS_MAX
            and (message := lane.peek()) is not None
        ):
            if count and self._monotonic_ns() >= until_ns:
                break
            if self._from_controller.has_more():  # the request may name a topic just created
                self._read_controller()
                self._report_topic_changes()
            kind, api, word, correlation_id = (
                message.kind,
                message.slot,
                message.session,
                message.correlation_id,
            )
            payload = bytes(message.payload)
            lane.advance(message)
            lane.consume()  # before it is handled, so that it is not read again after a failure
            count += 1
            if word and word >> 32 != front.generation:
                self._end_sessions(front)
                front.generation = word >> 32
                front.known_process, front.is_replaced = front.process_generation(), False
            if kind == LaneKind.REQUEST:
                if word:  # 0: a request of the front itself
                    front.sessions.add(word)
                self._handle(Requester(front.index, word, correlation_id), api, payload)
            elif kind == LaneKind.SESSION_CLOSED:
                front.sessions.discard(word)
                self._end_session(front, word)
        if front.is_replaced and not lane.has_more():
            front.is_replaced = False
            self._end_sessions(front)
        return count

    def _end_sessions(self, front: FrontLink) -> None:
        """End all sessions of a killed front."""
        sessions, front.sessions = front.sessions, set()
        for word in sorted(sessions):
            self._end_session(front, word, with_front=True)

    def _end_session(self, front: FrontLink, word: int, *, with_front: bool = False) -> None:
        service = self._transaction.service
        if service is not None:
            closed = partial(
                service.session_closed, SessionKey(front.index, word), with_front=with_front
            )
            self._transaction.guarded("session_closed", closed, self._now_ns)

    # ---- requests --------------------------------------------------------------------------------

    def _handle(self, requester: Requester, api: int, payload: bytes) -> None:
        """Handle one request. Any content is answered with a code and a body."""
        if self._transaction.service is None:
            self._transaction.refuse(requester)
            return
        try:
            request = Request(api, decode_json(payload))
        except WireError as error:
            self._answer(requester, error.code, encode_error(error.detail))
        else:
            if self._transaction.handle(requester, request) and api == Api.COMMIT_OFFSETS:
                self._slot.store(
                    ProcessWord.OFFSET_COMMITS, self._slot.load(ProcessWord.OFFSET_COMMITS) + 1
                )
        crash_point("groups.after_decision")

    def _answer(self, requester: Requester, code: int, body: bytes) -> None:
        front = self._fronts[requester.front]
        if len(body) > front.answers.payload_max:
            code, body = (
                ErrorCode.REQUEST_TOO_LARGE,
                encode_error(
                    f"the answer has {len(body)} bytes, the limit is {front.answers.payload_max}: "
                    "request fewer entries at once"
                ),
            )
        front.outbox.put(
            Outgoing(
                LaneKind.RESPONSE, 0, int(code), requester.session, requester.correlation_id, body
            )
        )

    def _push(self, push: Push) -> None:
        outbox = self._fronts[push.front].outbox
        if len(outbox.waiting) < PUSHES_MAX:
            outbox.put(Outgoing(LaneKind.PUSH, push.api, 0, push.session, 0, push.body))
