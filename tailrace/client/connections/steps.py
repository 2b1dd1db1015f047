"""Operations of a client as steps: generators that yield at each wait, and are resumed there.

An operation yields a Wait where it needs something to come, and an Invoke to call the user's code.
It returns its result. There are two runners. `run` runs it in the caller's thread and sleeps at
each wait. `tailrace.aio.event_loop.LoopConnection.run_steps` runs it in an event loop and awaits
there. The logic of an operation is thus written once, for both.

An operation may be ended at each of its waits: by KeyboardInterrupt or another exception of a
signal handler, by a task's cancellation, or by closing the generator. The runner raises the
exception in the operation, at that wait, as if the operation had slept there itself. `finally` and
`except` act as in a plain function. Hence two rules for an operation:

* At each wait its state is valid for others. Other threads and tasks use the client meanwhile, and
  the operation may never be resumed.
* Undoing belongs into a `finally`, which does not wait.

Owner: the runner of the operation.
Invariants: each operation is run by one runner, which has closed it when it returns.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial, wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
)

from tailrace.client.connections.call import PendingCall
from tailrace.core.errors import InvalidRequestError, error_for
from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import Api, WireError
from tailrace.protocol.json_messages import decode_json, encode_json
from tailrace.protocol.session import CLIENT_JSON_MAX_BYTES, Response

if TYPE_CHECKING:
    from tailrace.client.connections.connection import Connection

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C", bound="Runner")
P = ParamSpec("P")


class Wakeup:
    """An event that ends a wait, perhaps before the wait begins.

    An event loop resumes an operation with a Wakeup only when that was rung, and not with each
    message.
    """

    __slots__ = ("is_set", "on_ring")

    def __init__(self) -> None:
        self.is_set = False
        self.on_ring: Callable[[], None] | None = None
        """Called with each `ring`; set by the runner."""

    def ring(self) -> None:
        """Resume the operation: its response has come, or never will."""
        self.is_set = True
        if self.on_ring is not None:
            self.on_ring()


class Wait(NamedTuple):
    """A wait until something comes over the connection, or until `until_ns`.

    An operation may be resumed earlier. It then checks its condition and waits again.
    """

    until_ns: int | None = None
    """By the connection's clock. None: no time limit."""
    wakeup: Wakeup | None = None
    """The event that ends the wait. None: anything that comes ends it."""


PAUSE = Wait(0)
"""Lets the other tasks of an event loop run. A thread goes on at once."""


class Invoke(NamedTuple):
    """A call of the user's code: `function(*args)`. An event loop awaits the result if it can be.

    The operation is resumed with the result, or with the exception.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]


Steps: TypeAlias = Generator[Wait | Invoke, Any, T]
"""An operation that returns a T."""
Call: TypeAlias = "Callable[[Api, dict[str, Any]], Steps[dict[str, Any]]]"
"""A request and its response, both JSON, as an operation."""
Guard: TypeAlias = "Callable[[Callable[[], Response | None]], Response | None]"
"""Calls a function that uses the connection under the user's lock, and returns its result."""
Sleep: TypeAlias = "Callable[[int | None], object]"
"""Sleeps until something may have come, or until that time (None: no limit), by the connection's
clock.
"""


# ---- parts of operations -------------------------------------------------------------------------


def invoke(function: Callable[..., Any], *args: Any) -> Steps[Any]:
    """Call the user's code (see Invoke). Raises what it raises."""
    return (yield Invoke(function, args))


def call(
    connection: Connection,
    api: Api,
    body: Sequence[Readable],
    timeout_ms: int,
    connect_timeout_ms: int | None = None,
    start_ns: int | None = None,
    guard: Guard | None = None,
    *,
    returns_errors: bool = False,
) -> Steps[Response]:
    """Send a request and wait for its response. Raises as `call_now` does.

    `start_ns`: start of the timeouts, None for now. `guard` makes each use of a connection that
    others use too. `returns_errors`: a response with an error is returned, not raised.
    """
    wakeup = Wakeup()
    started_ns = connection.now_ns() if start_ns is None else start_ns
    pending = PendingCall(
        connection, api, body, timeout_ms, connect_timeout_ms, started_ns, wakeup.ring,
        returns_errors=returns_errors,
    )  # fmt: skip
    while (answer := pending.step() if guard is None else guard(pending.step)) is None:
        yield Wait(pending.wake_ns, wakeup)
    return answer


def call_json(
    connection: Connection,
    api: Api,
    request: dict[str, Any],
    timeout_ms: int,
    connect_timeout_ms: int | None = None,
    start_ns: int | None = None,
    guard: Guard | None = None,
) -> Steps[dict[str, Any]]:
    """Send a request as JSON and wait for its JSON response. Raises as `call` does, and
    MalformedRequestError for another response.
    """
    body = [encode_json(request)]
    response = yield from call(
        connection, api, body, timeout_ms, connect_timeout_ms, start_ns, guard
    )
    return decode_answer(api, response)


def decode_answer(api: Api, response: Response) -> dict[str, Any]:
    """The JSON of a response. Raises MalformedRequestError."""
    try:
        return decode_json(response.body[0] if response.body else b"", CLIENT_JSON_MAX_BYTES)
    except WireError as error:
        raise error_for(error.code, f"the answer to {api.name}: {error.detail}") from None


def lifted(function: Callable[..., R]) -> Callable[..., Steps[R]]:
    """Make an operation of a function that does not wait."""

    def steps(*args: Any, **keywords: Any) -> Steps[R]:
        yield from ()
        return function(*args, **keywords)

    return steps


# ---- methods -------------------------------------------------------------------------------------


class Runner(Protocol):
    """A client of threads, which runs its operations."""

    def _run_steps(self, steps: Steps[T], /) -> T: ...


def operation(steps: Callable[Concatenate[C, P], Steps[T]]) -> Callable[Concatenate[C, P], T]:
    """Decorator that makes a public method of an operation, for a client of threads.

    The method runs the operation and returns its result. `steps_of` returns the operation, for
    other operations and for the clients of event loops.
    """

    @wraps(steps)
    def method(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run_steps(steps(self, *args, **kwargs))

    signature = inspect.signature(steps)
    returned = str(signature.return_annotation).removeprefix("Steps[").removesuffix("]")
    method.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    method.__annotations__ = {**steps.__annotations__, "return": returned}
    return method


def steps_of(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], Steps[T]]:
    """The operation of a method that `operation` made."""
    steps: Callable[Concatenate[C, P], Steps[T]] = method.__wrapped__  # type: ignore[attr-defined]
    return steps


# ---- runners -------------------------------------------------------------------------------------


class Progress:
    """One running operation. Its runner calls `advance` until `is_done`.

    The next `advance` raises an exception of a wait, or of the user's code, in the operation.
    """

    __slots__ = ("_answer", "_error", "_steps", "is_done", "result")

    def __init__(self, steps: Steps[Any]) -> None:
        self._steps = steps
        self._answer: Any = None
        self._error: BaseException | None = None
        self.is_done = False
        self.result: Any = None

    def advance(self) -> Wait | Invoke | None:
        """Resume the operation. Returns its next wait or call, None when it is done. Raises what
        the operation raises.
        """
        answer, self._answer = self._answer, None
        error, self._error = self._error, None
        try:
            return self._steps.send(answer) if error is None else self._steps.throw(error)
        except StopIteration as end:
            self.result = end.value
            self.is_done = True
            return None
        finally:
            error = None  # else it would keep this frame alive, by its traceback

    def answer(self, result: Any) -> None:
        """Set the result of the call that the operation yielded."""
        self._answer = result

    def fail(self, error: BaseException) -> None:
        """Set the exception of the wait or call that the operation yielded."""
        self._error = error


def run(steps: Steps[T], sleep: Sleep) -> T:
    """Run an operation in this thread, and sleep at its waits. Raises what it raises."""
    progress = Progress(steps)
    try:
        while not progress.is_done:
            requested = progress.advance()
            if requested is None:
                break
            try:
                if type(requested) is Wait:
                    sleep(requested.until_ns)
                else:
                    assert type(requested) is Invoke
                    progress.answer(_not_awaited(requested.function(*requested.args)))
            except BaseException as error:
                progress.fail(error)
        result: T = progress.result
        return result
    finally:
        steps.close()


def _not_awaited(returned: Any) -> Any:
    """The result of the user's code. Raises InvalidRequestError for a coroutine, of which nothing
    would run.
    """
    if inspect.iscoroutine(returned):
        returned.close()
        raise InvalidRequestError(
            f"{returned.__qualname__} was called and returned a coroutine, which is not awaited "
            "here; give a plain function, or use the client of tailrace.aio"
        )
    return returned


def run_at_once(steps: Steps[T]) -> T:
    """Run an operation that does not wait. Raises RuntimeError if it does."""
    return run(steps, _refuse_to_sleep)


def _refuse_to_sleep(_until_ns: int | None) -> None:
    raise RuntimeError("an operation that must not wait has something to wait for; use run()")


def run_on(connection: Connection, steps: Steps[T], lock: threading.RLock | None = None) -> T:
    """Run an operation in this thread, and sleep on the connection at its waits.

    `lock`: of the owner, held once. It is released during a sleep, when others may close the
    connection.
    """
    if lock is None:
        return run(steps, connection.sleep_until)
    return run(steps, partial(connection.sleep_unlocked, lock))


def call_now(
    connection: Connection,
    api: Api,
    body: Sequence[Readable],
    timeout_ms: int,
    connect_timeout_ms: int | None = None,
    lock: threading.RLock | None = None,
) -> Response:
    """Send a request and wait for its response in this thread. `lock`: as in `run_on`.

    The request is repeated if the connection is lost, or the appliance cannot take it now. Raises
    NotReachableError without a connection within `connect_timeout_ms` (None: `timeout_ms`),
    RequestTimeoutError, ClientClosedError, or the response's error.
    """
    return run_on(connection, call(connection, api, body, timeout_ms, connect_timeout_ms), lock)


def call_json_now(
    connection: Connection,
    api: Api,
    request: dict[str, Any],
    timeout_ms: int,
    connect_timeout_ms: int | None = None,
    lock: threading.RLock | None = None,
) -> dict[str, Any]:
    """Send a request as JSON and wait for its JSON response, in this thread. Raises as `call_now`
    does, and MalformedRequestError for another response.
    """
    steps = call_json(connection, api, request, timeout_ms, connect_timeout_ms)
    return run_on(connection, steps, lock)
