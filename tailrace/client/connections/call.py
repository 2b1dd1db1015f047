"""One request of a client and the wait for its response, as steps that do not block.

`tailrace.client.connections.steps.call` makes an operation of it, which a thread or an event loop
runs.

Owner: the user of the connection, under the lock that guards it.
Invariants:
- At most one copy of the request has no response.
- It is sent again only when the connection was lost, or the appliance did nothing (RETRY_CODES).
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
    from tailrace.client.connections.connection import Connection

RETRY_CODES = frozenset({ErrorCode.NOT_READY, ErrorCode.TOO_MANY_REQUESTS})
"""Codes of responses after which the appliance has done nothing. The request is sent again."""
RETRY_INTERVAL_NS = 50_000_000
NS_PER_MS = 1_000_000


class PendingCall:
    """A request. Call `step()` until it returns the response. Between two steps wait for the
    connection's descriptor, or until `wake_ns`.
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
        *,
        returns_errors: bool = False,
    ) -> None:
        """`start_ns`: start of the timeouts. `on_answer`: called when a response has come or the
        connection was lost. A step is then due. `returns_errors`: a response with an error is
        returned, not raised.
        """
        self._returns_errors = returns_errors
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
        """True if the connection was lost after a copy of the request was sent."""
        self.wake_ns = start_ns
        """Time of the next step if nothing comes, by the connection's clock."""

    @property
    def outcome_unknown(self) -> bool:
        """True if a copy of the request was sent and got no response. It may have succeeded,
        whatever the response to another copy is.
        """
        return self._was_lost or self._is_sent

    def _on_response(self, response: Response | None) -> None:
        if response is not None or not self._answers:
            self._answers.append(response)
        if self._on_answer is not None:
            self._on_answer()

    def step(self) -> Response | None:
        """Do what can be done now. Returns the response once it has come.

        Raises NotReachableError if there was no connection in time, RequestTimeoutError,
        ClientClosedError, or the response's error.
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
            self._is_sent = connection.request(self._api, self._body, self._on_response)
            # Once it is sent, the response may be there: the descriptor reports changes only.
            if not self._is_sent:
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
        """The response, if it has come. Raises its error. A code of RETRY_CODES counts as none."""
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
            if self._returns_errors:
                self._answers.append(answer)
                return answer
            raise error_for(answer.code, answer.detail(), answer.correlation_id)
        return None

    def _next_step_ns(self, now_ns: int) -> int:
        until_ns = self._deadline_ns if self._was_ready else self._connect_by_ns
        if not self._is_sent and now_ns < self._ask_at_ns:
            until_ns = min(until_ns, self._ask_at_ns)
        tick_ns = self._connection.next_tick_ns()
        return until_ns if tick_ns is None else min(until_ns, tick_ns)
