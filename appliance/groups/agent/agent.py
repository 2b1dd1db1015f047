"""The process of groups: runs the group service between the lanes of fronts and coordinator.

A step takes in what is in the lanes, handles each request in memory and in one open transaction, commits once, and then sends the answers and pushes of
all that it took in (group commit: the more come at once, the fewer syncs each costs).

Owner: groups.db in the first data directory; in shared memory the tails of its lanes to the fronts.
Waits on its doorbell, and until the service's next timer.
Invariants: nothing is answered before what it says is committed; a request is consumed before it is looked at; what a step does not commit is forgotten in
    memory, too; a database that cannot be used costs requests of groups their answers, with a sentence, and nothing else.
Bounds: REQUESTS_AT_ONCE requests of a front in a step, and no more after READING_NS; of a front that does not take its answers nothing is read while
    ANSWERS_MAX wait. No session times out while something that came before waits to be read, nor for RESUMED_NS after this process stood still: it was not
    its members that were silent.
Crash: a successor reads the database; requests that were taken and not answered are answered by their fronts, which see that another process runs. Sessions
    of a front that was killed are ended when its successor shows.

Run as `python -P -m appliance.groups.agent`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from appliance.groups.front_link import FrontLink, Outgoing
from appliance.groups.limits import GroupLimits
from appliance.groups.messages import Answer, Push, Requester, SessionKey
from appliance.groups.service import GroupService
from appliance.groups.share.share_groups import ShareGroups
from appliance.groups.store import GroupStore
from appliance.groups.topics_view import CatalogTopics
from shm.catalog_messages import Assignment, LaneKind
from shm.control import ProcessSlot
from shm.crash_points import crash_point
from shm.lane import LaneReader
from shm.layout import Phase, ProcessWord, Role
from shm.runtime.boundary import Boundary
from shm.runtime.process import ProcessContext, configure_logging, process_name, run, start
from tailrace.errors import StorageError, TailraceError
from tailrace.formats.data_directory import GROUPS_FILE
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.requests import decode_json, encode_error
from tailrace.protocol.wire import Api, WireError

logger = logging.getLogger(__name__)

REQUESTS_AT_ONCE = 256
READING_NS = 50_000_000
"""A step that has taken so long commits before it reads on: a list of a large group takes some milliseconds, a commit some microseconds."""
ANSWERS_MAX = 1_024
PUSHES_MAX = 16_384
"""So many messages wait for room in a lane before pushes are dropped: a lost push is harmless."""
REOPEN_NS = 1_000_000_000
"""How soon a database that could not be used is tried again."""
TRY_AGAIN_NS = 20_000_000
"""How soon a lane that was full is looked at again."""
AFTER_FAILURE_NS = 1_000_000_000
"""How soon timers are looked at again whose handling failed."""
STOOD_STILL_NS = 500_000_000
"""So much later than it was to be is a step only when the process was stopped, or waited for a disk."""
RESUMED_NS = 1_000_000_000
"""How long timers wait then: what was sent meanwhile is on its way."""


class Store(Protocol):
    """What the agent does with the store of `appliance.groups.store`."""

    before_commit: list[Callable[[], None]]

    @property
    def is_in_transaction(self) -> bool: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def close(self) -> None: ...


class Service(Protocol):
    """What the agent does with the service of `appliance.groups.service`."""

    def handle(self, requester: Requester, api: int, request: dict[str, object], now_ns: int) -> None: ...

    def session_closed(self, session: SessionKey, now_ns: int, *, with_front: bool = False) -> None: ...

    def topics_changed(self, now_ns: int) -> None: ...

    def step(self, now_ns: int, heard_ns: int) -> None: ...

    def next_deadline_ns(self) -> int | None: ...

    def take_answers(self) -> list[Answer]: ...

    def take_pushes(self) -> list[Push]: ...

    def rolled_back(self, now_ns: int, error: TailraceError) -> None: ...


Opened = tuple[Store, Service]


class GroupsAgent:
    """An agent (see `shm.runtime.process`)."""

    def __init__(
        self,
        *,
        open_service: Callable[[CatalogTopics, int], Opened],
        topics: CatalogTopics,
        from_coordinator: LaneReader,
        fronts: list[FrontLink],
        generation: int,
        slot: ProcessSlot,
        boundary: Boundary,
        is_running: Callable[[], bool],
        on_ready: Callable[[], None],
        monotonic_ns: Callable[[], int],
        start_ns: int,
    ) -> None:
        """`open_service`: the store and the service over it, at this time; raises TailraceError when the database cannot be used."""
        self._open_service = open_service
        self._topics = topics
        self._from_coordinator = from_coordinator
        self._fronts = fronts
        self._generation = generation
        self._slot = slot
        self._boundary = boundary
        self._is_running = is_running
        self._on_ready = on_ready
        self._monotonic_ns = monotonic_ns
        self._now_ns = start_ns
        self._is_fed = False
        self._has_news = False
        """Whether topics have changed since the service was told."""
        self._opened: Opened | None = None
        self._open_at_ns = start_ns
        self._refusal: TailraceError = StorageError("groups.db is not open yet")
        """Why there is no service."""
        self._failure: TailraceError | None = None
        """Why what this step took in cannot be committed."""
        self._timers_at_ns = start_ns
        """Not before: handling them has failed, or the process stood still."""
        self._due_ns: int | None = None
        """When the next step was to be at the latest, as `next_deadline_ns` has said."""
        self._taken: list[Requester] = []
        """Whose requests this step gave to the service."""
        self._writes = False
        """Whether what is being committed has rows."""

    # ---- agent -----------------------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        """One turn of the loop: news, requests, timers, one commit, answers."""
        self._now_ns = now_ns
        if self._due_ns is not None and now_ns - self._due_ns >= STOOD_STILL_NS:
            self._timers_at_ns = max(self._timers_at_ns, now_ns + RESUMED_NS)
        self._due_ns = None
        work = self._read_coordinator()
        if not self._is_fed or not self._is_running():
            return work
        if self._opened is None and now_ns >= self._open_at_ns:
            self._open()
        if self._opened is not None and self._has_news:
            self._has_news = False
            self._guarded("topics_changed", self._opened[1].topics_changed, now_ns)
        read_until_ns = self._monotonic_ns() + READING_NS
        for front in self._fronts:
            work += self._read_front(front, read_until_ns)
        if self._opened is not None and now_ns >= self._timers_at_ns:
            self._guarded("timers", self._opened[1].step, now_ns, self._heard_ns())
        self._commit()
        self._due_ns = now_ns  # unless it sleeps, the next one follows at once
        return work + sum(front.outbox.flush() for front in self._fronts)

    def _heard_ns(self) -> int:
        """Up to when all that came is read, but for fronts that take no answers."""
        waiting = [front.requests.peek() for front in self._fronts if len(front.outbox.waiting) < ANSWERS_MAX]
        return min((message.arrival_ns for message in waiting if message is not None), default=self._now_ns)

    def has_more(self) -> bool:
        """Whether the next step has something to do at once."""
        return any(front.requests.has_more() and len(front.outbox.waiting) < ANSWERS_MAX for front in self._fronts)

    def next_deadline_ns(self) -> int | None:
        """When the next step has something to do, without a ring."""
        deadlines = []
        if self._opened is not None:
            timer_ns = self._opened[1].next_deadline_ns()
            if timer_ns is not None:
                deadlines.append(max(timer_ns, self._timers_at_ns))
        elif self._is_fed and self._is_running():  # before, the end of recovery rings
            deadlines.append(self._open_at_ns)
        if any(front.outbox.waiting or front.is_replaced for front in self._fronts):
            deadlines.append(self._now_ns + TRY_AGAIN_NS)
        self._due_ns = min(deadlines, default=None)
        return self._due_ns

    def begin_stop(self) -> None:
        """Nothing to finish: each step ends with its commit."""

    def is_finished(self) -> bool:
        return True

    def close(self) -> None:
        """Let go of the database."""
        if self._opened is not None:
            store, _ = self._opened
            self._opened = None
            store.close()

    # ---- the database ----------------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Begin with what is on the disk; what prevents that is said to everyone who asks, and tried again."""
        try:
            self._opened = self._open_service(self._topics, self._now_ns)
        except TailraceError as error:
            self._note_refusal(error)
        except Exception as error:
            self._note_refusal(TailraceError(self._boundary.caught("open_groups", error), ErrorCode.INTERNAL_ERROR))
        else:
            self._has_news = False
            self._timers_at_ns = self._now_ns
            self._opened[0].before_commit.append(self._look_at_transaction)  # behind those who write
            logger.info("groups_open")

    def _look_at_transaction(self) -> None:
        self._writes = self._opened is not None and self._opened[0].is_in_transaction

    def _note_refusal(self, error: TailraceError) -> None:
        if self._refusal.detail != error.detail:
            logger.error("groups_not_served reason=%r again_ms=%d", error.detail, REOPEN_NS // 1_000_000)
        self._refusal = error
        self._open_at_ns = self._now_ns + REOPEN_NS

    def _commit(self) -> None:
        """One transaction for all that this step took in; then its answers and pushes are sent."""
        if self._opened is None:
            return
        store, service = self._opened
        taken, self._taken = self._taken, []
        if taken:
            crash_point("groups.before_commit")
        if self._failure is None:
            self._guarded("commit", store.commit)
        failure, self._failure = self._failure, None
        if failure is not None:
            self._roll_back(store, service, failure, taken)
        elif self._writes:
            self._slot.store(ProcessWord.COMMIT_COUNT, self._slot.load(ProcessWord.COMMIT_COUNT) + 1)
        self._writes = False
        if taken:
            crash_point("groups.after_commit")
        for answer in service.take_answers():
            self._answer(answer.requester, answer.code, answer.body)
        for push in service.take_pushes():
            outbox = self._fronts[push.front].outbox
            if len(outbox.waiting) < PUSHES_MAX:
                outbox.put(Outgoing(LaneKind.PUSH, push.api, 0, push.session, 0, push.body))

    def _roll_back(self, store: Store, service: Service, error: TailraceError, taken: list[Requester]) -> None:
        """What this step took in did not happen. A service that cannot be brought back to what is on the disk is begun anew."""
        try:
            store.rollback()
            service.rolled_back(self._now_ns, error)
        except Exception as trouble:
            if not isinstance(trouble, TailraceError):
                self._boundary.caught("roll_back", trouble)
            service.take_answers()
            for requester in taken:
                self._answer(requester, error.code, encode_error(error.detail))
            self.close()
            self._note_refusal(error)

    def _guarded(self, what: str, work: Callable[..., None], *arguments: int) -> None:
        """Work of a step that no request has asked for: a failure costs the step, not the process."""
        try:
            work(*arguments)
        except TailraceError as error:
            self._failure = error
        except Exception as error:
            self._failure = TailraceError(self._boundary.caught(what, error), ErrorCode.INTERNAL_ERROR)
        if self._failure is not None:
            self._timers_at_ns = self._now_ns + AFTER_FAILURE_NS

    # ---- lanes -----------------------------------------------------------------------------------------------------------------------

    def _read_coordinator(self) -> int:
        lane = self._from_coordinator
        count = 0
        while (message := lane.peek()) is not None:
            kind, correlation_id, payload = message.kind, message.correlation_id, bytes(message.payload)
            lane.advance(message)
            lane.consume()
            count += 1
            if kind == LaneKind.ASSIGN:
                try:
                    self._has_news = self._topics.apply(Assignment.decode(payload)) or self._has_news
                except Exception as error:
                    self._boundary.caught("message=assignment", error)
            elif kind == LaneKind.FED and correlation_id == self._generation and not self._is_fed:
                self._is_fed = True
                self._on_ready()
        return count

    def _read_front(self, front: FrontLink, until_ns: int) -> int:
        """One request at least, if there is one: a busy front does not keep the others from their turn."""
        process = front.process_generation()
        if process != front.known_process:
            front.known_process, front.is_replaced = process, True
        lane = front.requests
        count = 0
        while count < REQUESTS_AT_ONCE and len(front.outbox.waiting) < ANSWERS_MAX and (message := lane.peek()) is not None:
            if count and self._monotonic_ns() >= until_ns:
                break
            kind, api, word, correlation_id = message.kind, message.slot, message.session, message.correlation_id
            payload = bytes(message.payload)
            lane.advance(message)
            lane.consume()  # first: whatever comes of it, it is not read again
            count += 1
            if word >> 32 != front.generation:
                self._end_sessions(front)
                front.generation = word >> 32
                front.known_process, front.is_replaced = front.process_generation(), False
            if kind == LaneKind.REQUEST:
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
        """The front was killed, and every connection with it."""
        sessions, front.sessions = front.sessions, set()
        for word in sorted(sessions):
            self._end_session(front, word, with_front=True)

    def _end_session(self, front: FrontLink, word: int, *, with_front: bool = False) -> None:
        if self._opened is not None:
            closed = partial(self._opened[1].session_closed, SessionKey(front.index, word), with_front=with_front)
            self._guarded("session_closed", closed, self._now_ns)

    # ---- requests --------------------------------------------------------------------------------------------------------------------

    def _handle(self, requester: Requester, api: int, payload: bytes) -> None:
        """One request, inside the boundary of the loop. Whatever it holds, the answer is a code and a sentence."""
        if self._opened is None:
            self._answer(requester, self._refusal.code, encode_error(self._refusal.detail))
            return
        _, service = self._opened
        try:
            service.handle(requester, api, decode_json(payload), self._now_ns)
            if api == Api.COMMIT_OFFSETS:
                self._slot.store(ProcessWord.OFFSET_COMMITS, self._slot.load(ProcessWord.OFFSET_COMMITS) + 1)
        except (TailraceError, WireError) as error:
            self._answer(requester, error.code, encode_error(error.detail))
        except Exception as error:  # the boundary of one request: what it has changed in memory is not known, so the step is undone
            sentence = self._boundary.caught(f"api={api} session={requester.session}", error)
            self._answer(requester, ErrorCode.INTERNAL_ERROR, encode_error(sentence))
            self._failure = TailraceError("another request of the same moment failed, and this one was undone with it", ErrorCode.NOT_READY)
        else:
            self._taken.append(requester)
        crash_point("groups.after_decision")

    def _answer(self, requester: Requester, code: int, body: bytes) -> None:
        front = self._fronts[requester.front]
        if len(body) > front.answers.payload_max:
            code, body = ErrorCode.REQUEST_TOO_LARGE, encode_error(f"the answer would take {len(body)} bytes: ask for less at once")
        front.outbox.put(Outgoing(LaneKind.RESPONSE, 0, int(code), requester.session, requester.correlation_id, body))


def build(context: ProcessContext, open_store: Callable[[str], GroupStore]) -> GroupsAgent:
    """The agent of this specification; it has asked to be fed. `open_store`: the database at a path."""
    spec, settings = context.spec, context.spec.settings

    def front_link(front: int) -> FrontLink:
        name, process = process_name(Role.FRONT, front), context.control.process(Role.FRONT, front)
        return FrontLink(
            front, context.lane_reader(name), context.lane_writer(name), context.bell(Role.FRONT, front), lambda: process.load(ProcessWord.READY_GENERATION)
        )  # fmt: skip

    fronts = [front_link(front) for front in range(int(settings["fronts"]))]
    limits = GroupLimits(
        members_max=int(settings["group.members.max"]),
        groups_max=int(settings["groups.max"]),
        session_timeout_min_ms=int(settings["group.session.timeout.min.ms"]),
        session_timeout_max_ms=int(settings["group.session.timeout.max.ms"]),
        offsets_retention_minutes=int(settings["offsets.retention.minutes"]),
    )
    answer_max = min(front.answers.payload_max for front in fronts)

    def open_service(topics: CatalogTopics, now_ns: int) -> Opened:
        store = open_store(f"{spec.data_dirs[0]}/{GROUPS_FILE}")
        try:
            share = ShareGroups(store, topics, limits, answer_max, now_ns, context.clock.wall_us)
            return store, GroupService(store, topics, limits, answer_max, now_ns, context.clock.wall_us, share=share)
        except BaseException:
            store.close()
            raise

    agent = GroupsAgent(
        open_service=open_service,
        topics=CatalogTopics([context.table(d) for d in range(len(spec.data_dirs))]),
        from_coordinator=context.lane_reader(process_name(Role.COORDINATOR, 0)),
        fronts=fronts,
        generation=spec.generation,
        slot=context.slot,
        boundary=Boundary(context.slot),
        is_running=lambda: context.control.phase is not Phase.RECOVERING,
        on_ready=context.report_ready,
        monotonic_ns=context.clock.monotonic_ns,
        start_ns=context.clock.monotonic_ns(),
    )
    context.ask_for_feed()
    for front in range(len(fronts)):  # what waits for this process there can come now
        context.bell(Role.FRONT, front).ring()
    return agent


def main() -> None:
    """The process."""
    context = start()
    configure_logging(context)
    agent = build(context, GroupStore)
    run(agent, context)
    agent.close()


if __name__ == "__main__":
    main()
