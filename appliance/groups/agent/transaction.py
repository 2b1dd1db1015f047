"""The transaction of a step: requests change the group service, one commit makes the changes
durable, and a failure undoes and redoes the step.

Owner: the agent of groups; groups.db through the store.
Invariants:
- An answer is sent after the commit of its change.
- An uncommitted change is undone in memory, too. A committed one never is.
- A failure of one group, or of one request, undoes the step. All other requests of the step are
  redone at once. If the commit shows that one of them is invalid, each is redone with a commit of
  its own.
- An unusable database refuses requests with its error, and is opened again every REOPEN_NS.
Crash: a successor reads the database. Uncommitted requests were not answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from appliance.groups.base.messages import Answer, GroupFailure, Push, Requester, SessionKey
from shm.crash_points import crash_point
from shm.memory.layout import Measure, ProcessWord
from shm.runtime.error_handler import CountedErrorHandler
from shm.runtime.logs.slow_operations import SLOW
from shm.tables.control import ProcessSlot
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError, StorageError, TailraceError
from tailrace.protocol.frame import WireError
from tailrace.protocol.json_messages import encode_error

logger = logging.getLogger(__name__)

REOPEN_NS = 1_000_000_000
"""Interval between attempts to open the database."""
AFTER_FAILURE_NS = 1_000_000_000
"""Pause of timers after a failure."""
REDO_MAX = 8
"""Limit of the attempts to redo a step, each without one more failed group or request. Then the
remaining requests are refused with NOT_READY.
"""


class Store(Protocol):
    """The part of `appliance.groups.store.group_store.GroupStore` that the agent uses."""

    before_commit: list[Callable[[], None]]

    @property
    def is_ahead(self) -> bool: ...

    @property
    def is_in_transaction(self) -> bool: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def close(self) -> None: ...


class Service(Protocol):
    """The part of `appliance.groups.agent.service.GroupService` that the agent uses."""

    def handle(
        self, requester: Requester, api: int, request: dict[str, object], now_ns: int
    ) -> None: ...

    def session_closed(
        self, session: SessionKey, now_ns: int, *, with_front: bool = False
    ) -> None: ...

    def topics_changed(self, now_ns: int) -> None: ...

    def limits_changed(self) -> None: ...

    def step(self, now_ns: int, last_request_ns: int) -> None: ...

    def next_deadline_ns(self) -> int | None: ...

    def drain_answers(self) -> list[Answer]: ...

    def drain_pushes(self) -> list[Push]: ...

    def rolled_back(self, now_ns: int, error: TailraceError, group: str | None = None) -> None: ...


Opened = tuple[Store, Service]


class Request(NamedTuple):
    """A decoded request of a client."""

    api: int
    content: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Failure:
    """The reason why a step cannot be committed. `is_of_one`: it concerns one group, if `group` is
    set, or one request. Otherwise it concerns the whole step.
    """

    error: TailraceError
    is_of_one: bool = False
    group: str | None = None


class StepTransaction:
    """The open store and service, and the requests and the failure of the current step."""

    def __init__(
        self,
        open_service: Callable[[int], Opened],
        slot: ProcessSlot,
        error_handler: CountedErrorHandler,
        answer: Callable[[Requester, int, bytes], None],
        push: Callable[[Push], None],
        start_ns: int,
    ) -> None:
        """`open_service`: opens the store and the service over it, called with the current time;
        raises TailraceError when the database cannot be used. `answer`, `push`: send a message.
        """
        self._open_service = open_service
        self._slot = slot
        self._commit_durations = slot.histogram(Measure.COMMIT)
        self._error_handler = error_handler
        self._answer = answer
        self._push = push
        self._now_ns = start_ns
        self._store: Store | None = None
        self.service: Service | None = None
        """None: the database is not open."""
        self.open_at_ns = start_ns
        """Time of the next attempt to open the database."""
        self.timers_at_ns = start_ns
        """Earliest time of the service's timers, after a failure or a suspension of the process."""
        self._refusal: TailraceError = StorageError("groups.db is not open yet")
        """The error for requests while the database is not open."""
        self._failure: _Failure | None = None
        """The first failure of this step."""
        self._handled: dict[Requester, Request] = {}
        """The requests of this step that the service has handled."""
        self._writes = False
        """The commit has rows."""
        self._redoes_apart = False
        """Each request that is redone has a commit of its own: one of them is invalid."""

    # ---- the database ----------------------------------------------------------------------------

    def try_open(self) -> bool:
        """Open the database. An error becomes the refusal of requests until the next attempt."""
        try:
            store, service = self._open_service(self._now_ns)
        except TailraceError as error:
            self._note_refusal(error)
        except Exception as error:
            self._note_refusal(
                TailraceError(
                    self._error_handler.on_error("open_groups", error), ErrorCode.INTERNAL_ERROR
                )
            )
        else:
            self._store, self.service = store, service
            self.timers_at_ns = self._now_ns
            self._slot.store(ProcessWord.GROUPS_REFUSED, 0)
            store.before_commit.append(self._check_transaction)  # behind the callbacks that write
            logger.info("groups_open")
            return True
        return False

    def close(self) -> None:
        """Close the database, if it is open."""
        store, self._store, self.service = self._store, None, None
        if store is not None:
            store.close()

    def _check_transaction(self) -> None:
        self._writes = self._store is not None and self._store.is_in_transaction

    def _note_refusal(self, error: TailraceError) -> None:
        if self._refusal.detail != error.detail:
            logger.error(
                "groups_not_served reason=%r retry_ms=%d", error.detail, REOPEN_NS // 1_000_000
            )
        self._refusal = error
        self._slot.store(ProcessWord.GROUPS_REFUSED, 1)
        self.open_at_ns = self._now_ns + REOPEN_NS

    # ---- the work of a step ----------------------------------------------------------------------

    def begin_step(self, now_ns: int) -> None:
        """Set the time of the step."""
        self._now_ns = now_ns

    def refuse(self, requester: Requester) -> None:
        """Refuse a request, since the database is not open."""
        self._answer(requester, self._refusal.code, encode_error(self._refusal.detail))

    def handle(self, requester: Requester, request: Request) -> bool:
        """Pass a request to the service. Returns False after an error, which is answered at
        once.
        """
        if self.service is None:
            self.refuse(requester)
            return False
        try:
            self.service.handle(requester, request.api, request.content, self._now_ns)
        except (TailraceError, WireError) as error:
            self._answer(requester, error.code, encode_error(error.detail))
        except Exception as error:
            # The request may have changed the service's memory, so the whole step is undone.
            sentence = self._error_handler.on_error(
                f"api={request.api} session={requester.session}", error
            )
            self._answer(requester, ErrorCode.INTERNAL_ERROR, encode_error(sentence))
            undone = TailraceError(
                "another request of the same step failed, and undid this one",
                ErrorCode.NOT_READY,
            )
            self._note_failure(_Failure(undone, True))
        else:
            self._handled[requester] = request
            return True
        return False

    def guarded(self, context: str, work: Callable[..., None], *arguments: int) -> bool:
        """Call work of the step that belongs to no request. An exception fails the step, not the
        process. Returns whether the work succeeded.
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
        self.timers_at_ns = self._now_ns + AFTER_FAILURE_NS
        return False

    def _note_failure(self, failure: _Failure) -> None:
        if self._failure is None:
            self._failure = failure

    # ---- commit ----------------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit the step, then send its answers and pushes. A failed step is redone without the
        failed group or request.
        """
        redo = self._commit_once()
        for _ in range(REDO_MAX):
            if not redo:
                return
            pending, redo = redo, {}
            for requester, request in pending.items():
                self.handle(requester, request)
                if self._redoes_apart:
                    redo.update(self._commit_once())
            if not self._redoes_apart:
                redo = self._commit_once()
            self._redoes_apart = False
        for requester in redo:
            self._answer(
                requester,
                ErrorCode.NOT_READY,
                encode_error("other requests of the same step failed repeatedly"),
            )

    def _commit_once(self) -> dict[Requester, Request]:
        """Commit or roll back, and answer. Returns the requests to redo, which a failure of others
        has undone.
        """
        if self._store is None or self.service is None:
            return {}
        store, service = self._store, self.service
        handled, self._handled = self._handled, {}
        if handled:
            crash_point("groups.before_commit")
        if self._failure is None:
            begin_ns = time.monotonic_ns()
            self.guarded("commit", store.commit)
            if self._writes:
                duration_ns = time.monotonic_ns() - begin_ns
                self._commit_durations.add(duration_ns)
                if duration_ns > SLOW.limit_ns:
                    SLOW.log("commit", duration_ns, requests=len(handled))
        failure, self._failure = self._failure, None
        if failure is not None and not self._redoes_apart and _is_fault_of_request(failure):
            self._redoes_apart = True
            failure = _Failure(failure.error, True)
        if failure is not None:
            self._roll_back(store, service, failure, list(handled))
        elif self._writes:
            self._slot.store(
                ProcessWord.COMMIT_COUNT, self._slot.load(ProcessWord.COMMIT_COUNT) + 1
            )
        self._writes = False
        if handled:
            crash_point("groups.after_commit")
        redo = {}
        for answer in service.drain_answers():
            request = handled.get(answer.requester)
            if (
                failure is not None
                and request is not None
                and _should_redo(answer, request, failure)
            ):
                redo[answer.requester] = request
            else:
                self._answer(answer.requester, answer.code, answer.body)
        for push in service.drain_pushes():
            self._push(push)
        return redo

    def _roll_back(
        self, store: Store, service: Service, failure: _Failure, handled: list[Requester]
    ) -> None:
        """Undo the step. A service that cannot be reloaded is closed, and opened again later. So is
        one that has failed behind the commit: what is durable is not undone.
        """
        error = failure.error
        try:
            if store.is_ahead:
                raise StorageError("a step was committed and could not be ended in memory")
            store.rollback()
            service.rolled_back(self._now_ns, error, failure.group)
        except Exception as reload_error:
            if not isinstance(reload_error, TailraceError):
                self._error_handler.on_error("roll_back", reload_error)
            service.drain_answers()
            for requester in handled:
                self._answer(requester, error.code, encode_error(error.detail))
            self.close()
            self._note_refusal(error)


def _is_fault_of_request(failure: _Failure) -> bool:
    """True when the commit has found a request invalid without saying which."""
    return not failure.is_of_one and isinstance(failure.error, InvalidRequestError)


def _should_redo(answer: Answer, request: Request, failure: _Failure) -> bool:
    """True when the failure of another group or request has undone this one."""
    return (
        answer.is_undone
        and failure.is_of_one
        and (failure.group is None or request.content.get("group") != failure.group)
    )
