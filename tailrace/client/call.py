"""One request of a client's and the wait for its answer, as steps that do not block.

`Connection.call` takes the steps in the caller's thread and sleeps between them; `tailrace.aio`
takes them in an event loop and awaits between them.

Owner: the user of the connection, under the lock that guards it.
Invariants: at most one copy of the request waits for an answer; it is sent again only when the
    connection was lost, or the appliance said that it did nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import NotReachableError, RequestTimeoutError, error_for
from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response

if TYPE_CHECKING:
    from tailrace.client.connection import Connection

RETRY_CODES = frozenset({ErrorCode.NOT_READY, ErrorCode.TOO_MANY_REQUESTS})
"""Nothing was done: the request is sent again."""
RETRY_INTERVAL_NS = 50_000_000
NS_PER_MS = 1_000_000


class PendingCall:
    """`step()` until it returns the answer; between two steps wait for the connection's descriptor,
    or until `wake_ns`.
    """

    def __init__(
        self,
        connection: Connection,
        api: Api,
        body: Sequence[Readable],
        timeout_ms: int,
        connect_timeout_ms: int | None,
        start_ns: int,
        on_answer: Callable[[], None] | None = None,
    ) -> None:
        """`start_ns`: since when the timeouts run. `on_answer`: called when an answer has come, or
        the connection was lost; a step is due then.
        """
        self._connection = connection
        self._api = api
        self._body = body
        self._timeout_ms = timeout_ms
        self._deadline_ns = start_ns + timeout_ms * NS_PER_MS
        self._connect_by_ns = self._deadline_ns
        if connect_timeout_ms is not None:
            self._connect_by_ns = min(self._deadline_ns, start_ns + connect_timeout_ms * NS_PER_MS)
        self._on_answer = on_answer
        self._answers: list[Response | None] = []
        self._is_sent = False
        self._ask_at_ns = start_ns
        self._was_ready = False
        self._was_lost = False
        """Whether a copy of the request was under way when its connection was lost."""
        self.wake_ns = start_ns
        """When a step is due though nothing has come, by the connection's clock."""

    @property
    def outcome_unknown(self) -> bool:
        """Whether a copy of the request was sent and got no answer: it may have been carried out,
        whatever is said of another one.
        """
        return self._was_lost or self._is_sent

    def _take(self, response: Response | None) -> None:
        if response is not None or not self._answers:
            self._answers.append(response)
        if self._on_answer is not None:
            self._on_answer()

    def step(self) -> Response | None:
        """Do what can be done now; returns the answer once it has come.

        Raises NotReachableError when no connection came about in time, RequestTimeoutError,
        ClientClosedError, or what the answer says.
        """
        connection = self._connection
        while True:
            connection.check_usable()
            connection.process()
            answer = self._answer()
            if answer is not None:
                return answer
            if connection.fatal is not None:
                raise connection.fatal
            self._was_ready = self._was_ready or connection.is_ready
            if self._is_sent or connection.now_ns() < self._ask_at_ns:
                break
            self._is_sent = connection.request(self._api, self._body, self._take)
            if not self._is_sent:
                # once it is sent, the answer may be there: the descriptor tells of changes only
                break
        now_ns = connection.now_ns()
        if now_ns >= self._deadline_ns and self._was_ready:
            raise RequestTimeoutError(
                f"{self._api.name} got no answer within {self._timeout_ms} "
                f"ms{connection.peer_error_suffix()}"
            )
        if now_ns >= self._connect_by_ns and not self._was_ready:
            raise NotReachableError(
                f"no appliance answers at {connection.address}{connection.peer_error_suffix()}"
            )
        connection.tick(now_ns)
        self.wake_ns = self._next_step_ns(now_ns)
        return None

    def _answer(self) -> Response | None:
        """The answer, if it is one; what asks for patience is forgotten. Raises what the answer
        says.
        """
        if not self._answers:
            return None
        answer = self._answers[-1]
        if answer is not None and answer.code is ErrorCode.OK:
            return answer  # and again, where a signal keeps the caller from having it
        self._is_sent = False
        self._answers.pop()
        if answer is None:
            self._was_lost = True
            return None
        self._ask_at_ns = self._connection.now_ns() + RETRY_INTERVAL_NS
        if answer.code not in RETRY_CODES or self._ask_at_ns >= self._deadline_ns:
            raise error_for(answer.code, answer.detail())
        return None

    def _next_step_ns(self, now_ns: int) -> int:
        until_ns = self._deadline_ns if self._was_ready else self._connect_by_ns
        if not self._is_sent and now_ns < self._ask_at_ns:
            until_ns = min(until_ns, self._ask_at_ns)
        tick_ns = self._connection.next_tick_ns()
        return until_ns if tick_ns is None else min(until_ns, tick_ns)
