"""The process of groups: runs the group service between the lanes of fronts and controller.

A step takes in what is in the lanes, handles each request in memory and in one open transaction,
commits once, and then sends the answers and pushes of all that it took in (group commit: the more
come at once, the fewer syncs each costs).

Owner: groups.db in the first data directory; in shared memory the tails of its lanes to the fronts.
Waits on its doorbell, and until the service's next timer.
Invariants: nothing is answered before what it says is committed; a request is consumed before it is
    looked at; what a step does not commit is forgotten in memory, too; what fails for one group, or
    one request, is undone with its step, whose other requests are carried out again at once; a
    database that cannot be used costs requests of groups their answers, with a sentence, and
    nothing else.
Bounds: REQUESTS_AT_ONCE requests of a front in a step, and no more after READING_NS; of a front
    that does not take its answers nothing is read while ANSWERS_MAX wait. No session times out
    while something that came before waits to be read, nor for RESUMED_NS after this process stood
    still: it was not its members that were silent.
Crash: a successor reads the database; requests that were taken and not answered are answered by
    their fronts, which see that another process runs. Sessions of a front that was killed are ended
    when its successor shows.

Run as `python -P -m appliance.groups.agent.agent`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from appliance.groups.agent.front_link import FrontLink, Outgoing
from appliance.groups.agent.service import GroupService
from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.messages import Answer, GroupFailure, Push, Requester, SessionKey
from appliance.groups.base.store import GroupStore
from appliance.groups.base.topic_image import CatalogTopicImage
from appliance.groups.share.share_service import ShareService
from shm.control import ProcessSlot
from shm.crash_points import crash_point
from shm.lane import LaneReader
from shm.lane_messages import Assignment, LaneKind
from shm.layout import Phase, ProcessWord, Role
from shm.runtime.agent_runner import ProcessContext, configure_logging, process_name, run, start
from shm.runtime.error_handler import CountedErrorHandler
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import StorageError, TailraceError
from tailrace.format.data_dir import GROUPS_FILE
from tailrace.protocol.frame import Api, WireError
from tailrace.protocol.messages import decode_json, encode_error

logger = logging.getLogger(__name__)

REQUESTS_AT_ONCE = 256
READING_NS = 50_000_000
"""A step that has taken so long commits before it reads on: a list of a large group takes some
milliseconds, a commit some microseconds.
"""
ANSWERS_MAX = 1_024
PUSHES_MAX = 16_384
"""So many messages wait for room in a lane before pushes are dropped: a lost push is harmless."""
REOPEN_NS = 1_000_000_000
"""How soon a database that could not be used is tried redo."""
RETRY_INTERVAL_NS = 20_000_000
"""How soon a lane that was full is looked at redo."""
AFTER_FAILURE_NS = 1_000_000_000
"""How soon timers are looked at again whose handling failed."""
SUSPENDED_NS = 500_000_000
"""So much later than it was to be is a step only when the process was stopped, or waited for a
disk.
"""
REDO_MAX = 8
"""So often a step is carried out again, each time without one group or request more; then who is
left is told NOT_READY.
"""
RESUMED_NS = 1_000_000_000
"""How long timers wait then: what was sent meanwhile is on its way."""


class Store(Protocol):
    """What the agent does with the store of `appliance.groups.base.store`."""

    before_commit: list[Callable[[], None]]

    @property
    def is_in_transaction(self) -> bool: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def close(self) -> None: ...


class Service(Protocol):
    """What the agent does with the service of `appliance.groups.agent.service`."""

    def handle(
        self, requester: Requester, api: int, request: dict[str, object], now_ns: int
    ) -> None: ...

    def session_closed(
        self, session: SessionKey, now_ns: int, *, with_front: bool = False
    ) -> None: ...

    def topics_changed(self, now_ns: int) -> None: ...

    def step(self, now_ns: int, last_request_ns: int) -> None: ...

    def next_deadline_ns(self) -> int | None: ...

    def drain_answers(self) -> list[Answer]: ...

    def drain_pushes(self) -> list[Push]: ...

    def rolled_back(self, now_ns: int, error: TailraceError, group: str | None = None) -> None: ...


class _Request(NamedTuple):
    """A request that was given to the service."""

    api: int
    content: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a step cannot be committed. `is_of_one`: one group, if it has a name here, or one request
    has failed; else all have.
    """

    error: TailraceError
    is_of_one: bool = False
    group: str | None = None


Opened = tuple[Store, Service]


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
    ) -> None:
        """`open_service`: the store and the service over it, at this time; raises TailraceError
        when the database cannot be used.
        """
        self._open_service = open_service
        self._topics = topics
        self._from_controller = from_controller
        self._fronts = fronts
        self._generation = generation
        self._slot = slot
        self._error_handler = error_handler
        self._is_running = is_running
        self._on_ready = on_ready
        self._monotonic_ns = monotonic_ns
        self._now_ns = start_ns
        self._is_fed = False
        self._has_topic_changes = False
        """Whether topics have changed since the service was told."""
        self._opened: Opened | None = None
        self._open_at_ns = start_ns
        self._refusal: TailraceError = StorageError("groups.db is not open yet")
        """Why there is no service."""
        self._failure: _Failure | None = None
        """Why what this step took in cannot be committed; the first reason."""
        self._events_at_ns = start_ns
        """Not before: telling the service of other topics has failed."""
        self._timers_at_ns = start_ns
        """Not before: handling them has failed, or the process stood still."""
        self._due_ns: int | None = None
        """When the next step was to be at the latest, as `next_deadline_ns` has said."""
        self._taken: dict[Requester, _Request] = {}
        """What this step gave to the service."""
        self._writes = False
        """Whether what is being committed has rows."""

    # ---- agent -----------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        """One turn of the loop: news, requests, timers, one commit, answers."""
        self._now_ns = now_ns
        if self._due_ns is not None and now_ns - self._due_ns >= SUSPENDED_NS:
            self._timers_at_ns = max(self._timers_at_ns, now_ns + RESUMED_NS)
        self._due_ns = None
        work = self._read_controller()
        if not self._is_fed or not self._is_running():
            return work
        if self._opened is None and now_ns >= self._open_at_ns:
            self._open()
        self._report_topic_changes()
        read_until_ns = self._monotonic_ns() + READING_NS
        for front in self._fronts:
            work += self._read_front(front, read_until_ns)
        if self._opened is not None and now_ns >= self._timers_at_ns:
            self._guarded("timers", self._opened[1].step, now_ns, self._last_received_ns())
        self._commit()
        self._due_ns = now_ns  # unless it sleeps, the next one follows at once
        return work + sum(front.outbox.flush() for front in self._fronts)

    def _report_topic_changes(self) -> None:
        """Tell the service that topics have changed."""
        now_ns = self._now_ns
        if self._opened is not None and self._has_topic_changes and now_ns >= self._events_at_ns:
            self._has_topic_changes = not self._guarded(
                "topics_changed", self._opened[1].topics_changed, now_ns
            )
            self._events_at_ns = now_ns + AFTER_FAILURE_NS if self._has_topic_changes else now_ns

    def _last_received_ns(self) -> int:
        """Up to when all that came is read, but for fronts that take no answers."""
        waiting = [
            front.requests.peek()
            for front in self._fronts
            if len(front.outbox.waiting) < ANSWERS_MAX
        ]
        return min(
            (message.arrival_ns for message in waiting if message is not None), default=self._now_ns
        )

    def has_more(self) -> bool:
        """Whether the next step has something to do at once."""
        return any(
            front.requests.has_more() and len(front.outbox.waiting) < ANSWERS_MAX
            for front in self._fronts
        )

    def next_deadline_ns(self) -> int | None:
        """When the next step has something to do, without a ring."""
        deadlines = []
        if self._opened is not None:
            timer_ns = self._opened[1].next_deadline_ns()
            if timer_ns is not None:
                deadlines.append(max(timer_ns, self._timers_at_ns))
            if self._has_topic_changes:
                deadlines.append(self._events_at_ns)
        elif self._is_fed and self._is_running():  # before, the end of recovery rings
            deadlines.append(self._open_at_ns)
        if any(front.outbox.waiting or front.is_replaced for front in self._fronts):
            deadlines.append(self._now_ns + RETRY_INTERVAL_NS)
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

    # ---- the database ----------------------------------------------------------------------------

    def _open(self) -> None:
        """Begin with what is on the disk; what prevents that is said to everyone who asks, and
        tried redo.
        """
        try:
            self._opened = self._open_service(self._topics, self._now_ns)
        except TailraceError as error:
            self._note_refusal(error)
        except Exception as error:
            self._note_refusal(
                TailraceError(
                    self._error_handler.on_error("open_groups", error), ErrorCode.INTERNAL_ERROR
                )
            )
        else:
            self._has_topic_changes = False
            self._timers_at_ns = self._now_ns
            self._opened[0].before_commit.append(self._check_transaction)  # behind those who write
            logger.info("groups_open")

    def _check_transaction(self) -> None:
        self._writes = self._opened is not None and self._opened[0].is_in_transaction

    def _note_refusal(self, error: TailraceError) -> None:
        if self._refusal.detail != error.detail:
            logger.error(
                "groups_not_served reason=%r retry_ms=%d", error.detail, REOPEN_NS // 1_000_000
            )
        self._refusal = error
        self._open_at_ns = self._now_ns + REOPEN_NS

    def _commit(self) -> None:
        """One transaction for all that this step took in; then its answers and pushes are sent."""
        redo = self._commit_once()
        for _ in range(REDO_MAX):
            if not redo:
                return
            for requester, request in redo.items():
                self._carry_out(requester, request)
            redo = self._commit_once()
        for requester in redo:
            self._answer(
                requester,
                ErrorCode.NOT_READY,
                encode_error(
                    "groups that were asked for in the same moment have failed: try again"
                ),
            )

    def _commit_once(self) -> dict[Requester, _Request]:
        """Commit, or undo, and answer. Returns the requests that are to be carried out again, since
        what has failed was not theirs.
        """
        if self._opened is None:
            return {}
        store, service = self._opened
        taken, self._taken = self._taken, {}
        if taken:
            crash_point("groups.before_commit")
        if self._failure is None:
            self._guarded("commit", store.commit)
        failure, self._failure = self._failure, None
        if failure is not None:
            self._roll_back(store, service, failure, list(taken))
        elif self._writes:
            self._slot.store(
                ProcessWord.COMMIT_COUNT, self._slot.load(ProcessWord.COMMIT_COUNT) + 1
            )
        self._writes = False
        if taken:
            crash_point("groups.after_commit")
        redo = {}
        for answer in service.drain_answers():
            request = taken.get(answer.requester)
            if (
                failure is not None
                and request is not None
                and _should_redo(answer, request, failure)
            ):
                redo[answer.requester] = request
            else:
                self._answer(answer.requester, answer.code, answer.body)
        for push in service.drain_pushes():
            outbox = self._fronts[push.front].outbox
            if len(outbox.waiting) < PUSHES_MAX:
                outbox.put(Outgoing(LaneKind.PUSH, push.api, 0, push.session, 0, push.body))
        return redo

    def _roll_back(
        self, store: Store, service: Service, failure: _Failure, taken: list[Requester]
    ) -> None:
        """What this step took in did not happen. A service that cannot be brought back to what is
        on the disk is begun anew.
        """
        error = failure.error
        try:
            store.rollback()
            service.rolled_back(self._now_ns, error, failure.group)
        except Exception as trouble:
            if not isinstance(trouble, TailraceError):
                self._error_handler.on_error("roll_back", trouble)
            service.drain_answers()
            for requester in taken:
                self._answer(requester, error.code, encode_error(error.detail))
            self.close()
            self._note_refusal(error)

    def _guarded(self, context: str, work: Callable[..., None], *arguments: int) -> bool:
        """Work of a step that no request has asked for: a failure costs the step, not the process.
        Returns whether it was done.
        """
        try:
            work(*arguments)
        except GroupFailure as failure:
            error = failure.error
            if not isinstance(error, TailraceError):
                error = TailraceError(
                    self._error_handler.on_error(f"{context} group={failure.group!r}", error),
                    ErrorCode.INTERNAL_ERROR,
                )
            else:
                logger.error(
                    "group_failed what=%s group=%r reason=%r", context, failure.group, error.detail
                )
            self._note_failure(_Failure(error, True, failure.group))
            return False
        except TailraceError as error:
            self._note_failure(_Failure(error))
        except Exception as error:
            self._note_failure(
                _Failure(
                    TailraceError(
                        self._error_handler.on_error(context, error), ErrorCode.INTERNAL_ERROR
                    )
                )
            )
        else:
            return True
        self._timers_at_ns = self._now_ns + AFTER_FAILURE_NS
        return False

    def _note_failure(self, failure: _Failure) -> None:
        if self._failure is None:
            self._failure = failure

    # ---- lanes -----------------------------------------------------------------------------------

    def _read_controller(self) -> int:
        lane = self._from_controller
        count = 0
        while (message := lane.peek()) is not None:
            kind, correlation_id, payload = (
                message.kind,
                message.correlation_id,
                bytes(message.payload),
            )
            lane.advance(message)
            lane.consume()
            count += 1
            if kind == LaneKind.ASSIGN:
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
        """One request at least, if there is one: a busy front does not keep the others from their
        turn.
        """
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
            if self._from_controller.has_more():  # the request may be of a topic just created
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
            closed = partial(
                self._opened[1].session_closed, SessionKey(front.index, word), with_front=with_front
            )
            self._guarded("session_closed", closed, self._now_ns)

    # ---- requests --------------------------------------------------------------------------------

    def _handle(self, requester: Requester, api: int, payload: bytes) -> None:
        """One request, inside the boundary of the loop. Whatever it holds, the answer is a code and
        a sentence.
        """
        if self._opened is None:
            self._answer(requester, self._refusal.code, encode_error(self._refusal.detail))
            return
        try:
            request = _Request(api, decode_json(payload))
        except WireError as error:
            self._answer(requester, error.code, encode_error(error.detail))
        else:
            self._carry_out(requester, request)
            if api == Api.COMMIT_OFFSETS and requester in self._taken:
                self._slot.store(
                    ProcessWord.OFFSET_COMMITS, self._slot.load(ProcessWord.OFFSET_COMMITS) + 1
                )
        crash_point("groups.after_decision")

    def _carry_out(self, requester: Requester, request: _Request) -> None:
        """Give a request to the service, if there is one."""
        if self._opened is None:
            self._answer(requester, self._refusal.code, encode_error(self._refusal.detail))
            return
        try:
            self._opened[1].handle(requester, request.api, request.content, self._now_ns)
        except (TailraceError, WireError) as error:
            self._answer(requester, error.code, encode_error(error.detail))
        except Exception as error:  # the boundary of one request: what it has changed in memory is not known, so the step is undone  # noqa: E501
            sentence = self._error_handler.on_error(
                f"api={request.api} session={requester.session}", error
            )
            self._answer(requester, ErrorCode.INTERNAL_ERROR, encode_error(sentence))
            undone = TailraceError(
                "another request of the same moment failed, and this one was undone with it",
                ErrorCode.NOT_READY,
            )
            self._note_failure(_Failure(undone, True))
        else:
            self._taken[requester] = request

    def _answer(self, requester: Requester, code: int, body: bytes) -> None:
        front = self._fronts[requester.front]
        if len(body) > front.answers.payload_max:
            code, body = (
                ErrorCode.REQUEST_TOO_LARGE,
                encode_error(f"the answer would take {len(body)} bytes: ask for less at once"),
            )
        front.outbox.put(
            Outgoing(
                LaneKind.RESPONSE, 0, int(code), requester.session, requester.correlation_id, body
            )
        )


def _should_redo(answer: Answer, request: _Request, failure: _Failure) -> bool:
    """Whether the request was undone for what has failed elsewhere."""
    return (
        answer.is_undone
        and failure.is_of_one
        and (failure.group is None or request.content.get("group") != failure.group)
    )


def build(context: ProcessContext, open_store: Callable[[str], GroupStore]) -> GroupsAgent:
    """The agent of this specification; it has asked to be fed. `open_store`: the database at a
    path.
    """
    spec, settings = context.spec, context.spec.settings

    def front_link(front: int) -> FrontLink:
        name, process = process_name(Role.FRONT, front), context.control.process(Role.FRONT, front)
        return FrontLink(
            front, context.lane_reader(name), context.lane_writer(name),
            context.bell(Role.FRONT, front), lambda: process.load(ProcessWord.READY_GENERATION)
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

    def open_service(topics: CatalogTopicImage, now_ns: int) -> Opened:
        store = open_store(f"{spec.data_dirs[0]}/{GROUPS_FILE}")
        try:
            share = ShareService(store, topics, limits, answer_max, now_ns, context.clock.wall_us)
            return store, GroupService(
                store, topics, limits, answer_max, now_ns, context.clock.wall_us, share=share
            )
        except BaseException:
            store.close()
            raise

    agent = GroupsAgent(
        open_service=open_service,
        topics=CatalogTopicImage([context.table(d) for d in range(len(spec.data_dirs))]),
        from_controller=context.lane_reader(process_name(Role.CONTROLLER, 0)),
        fronts=fronts,
        generation=spec.generation,
        slot=context.slot,
        error_handler=CountedErrorHandler(context.slot),
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
