"""An operation of a client as steps: it says what it waits for, and is resumed there. It is never
begun again.

An operation is a generator. It yields a Wait where it cannot go on before something has come, and
an Invoke where the user's code is to be called; it returns its result. Two runners take the steps:
`run` in the caller's thread, which sleeps where the operation waits, and
`tailrace.aio.event_loop.Driver.run_steps` in an event loop, which awaits there. So the logic of an
operation is written once, for both.

An operation written as steps may be ended at each of its waits: by KeyboardInterrupt or another
exception of a signal's handler, by a task's cancellation, by closing the generator. The runner then
raises the exception in the operation, at that wait, as if the operation had slept there itself, and
`finally` and `except` act as they do in a plain function. Hence two rules for an operation:

* At each wait its state is one that others may find: other threads and tasks use the client
  meanwhile, and the operation may never be resumed.
* What has to be undone stands in a `finally`, which does not wait.

Owner: whoever runs the operation.
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

from tailrace.client.call import PendingCall
from tailrace.core.errors import error_for
from tailrace.format.crc32c import Readable
from tailrace.protocol import messages as requests
from tailrace.protocol.frame import Api, WireError
from tailrace.protocol.session import CLIENT_JSON_MAX_BYTES, Response

if TYPE_CHECKING:
    from tailrace.client.connection import Connection

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C", bound="Runner")
P = ParamSpec("P")


class Wakeup:
    """Rung when that has come which an operation waits for, perhaps before it waits.

    An event loop resumes an operation that has a bell when the bell has rung, not with each
    message.
    """

    __slots__ = ("is_set", "on_ring")

    def __init__(self) -> None:
        self.is_set = False
        self.on_ring: Callable[[], None] | None = None
        """Called with each ring; the runner's."""

    def ring(self) -> None:
        """What is waited for has come, or never will: the operation is to look."""
        self.is_set = True
        if self.on_ring is not None:
            self.on_ring()


class Wait(NamedTuple):
    """The operation can go on when something has come over the connection, and looks at `until_ns`
    at the latest.

    An operation may be resumed sooner: it looks whether that is there for which it waits, and waits
    again.
    """

    until_ns: int | None = None
    """By the connection's clock; None: no time limit."""
    wakeup: Wakeup | None = None
    """What tells that its answer has come; None: it looks at everything that comes."""


PAUSE = Wait(0)
"""The operation has worked for long: the other tasks of an event loop have their turn. A thread
goes on at once.
"""


class Invoke(NamedTuple):
    """The user's code is to be called: in a thread `function(*args)`; in an event loop its result
    is awaited where it can be.

    The operation is resumed with what the call returned, or with what it raised.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]


Steps: TypeAlias = Generator[Wait | Invoke, Any, T]
"""An operation that returns a T."""
Call: TypeAlias = "Callable[[Api, dict[str, Any]], Steps[dict[str, Any]]]"
"""A request and its answer, both JSON, as an operation."""
Guard: TypeAlias = "Callable[[Callable[[], Response | None]], Response | None]"
"""Calls a function that uses the connection, under the lock of the connection's user; returns what
it returns.
"""
Sleep: TypeAlias = "Callable[[int | None], object]"
"""Sleep until something may have come, or until that time (None: without limit), by the
connection's clock.
"""


# ---- what an operation says ----------------------------------------------------------------------


def invoke(function: Callable[..., Any], *args: Any) -> Steps[Any]:
    """Call the user's code; see Invoke. Raises what it raises."""
    return (yield Invoke(function, args))


def call(
    connection: Connection,
    api: Api,
    body: Sequence[Readable],
    timeout_ms: int,
    connect_timeout_ms: int | None = None,
    start_ns: int | None = None,
    guard: Guard | None = None,
) -> Steps[Response]:
    """Send a request and wait for its answer; see `Connection.call`, which raises the same.

    `start_ns`: since when the timeouts run; None: from now on. `guard`: has each use of the
    connection made by itself, where others use it too.
    """
    wakeup = Wakeup()
    started_ns = connection.now_ns() if start_ns is None else start_ns
    pending = PendingCall(
        connection, api, body, timeout_ms, connect_timeout_ms, started_ns, wakeup.ring
    )
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
    """`call` with JSON both ways. Raises what it does, and MalformedRequestError for an answer that
    is not JSON.
    """
    body = [requests.encode_json(request)]
    response = yield from call(
        connection, api, body, timeout_ms, connect_timeout_ms, start_ns, guard
    )
    return decode_answer(api, response)


def decode_answer(api: Api, response: Response) -> dict[str, Any]:
    """The JSON of an answer. Raises MalformedRequestError when it is none."""
    try:
        return requests.decode_json(
            response.body[0] if response.body else b"", CLIENT_JSON_MAX_BYTES
        )
    except WireError as error:
        raise error_for(error.code, f"the answer to {api.name}: {error.detail}") from None


def lifted(function: Callable[..., R]) -> Callable[..., Steps[R]]:
    """A function that does not wait, in the place of an operation."""

    def steps(*args: Any, **keywords: Any) -> Steps[R]:
        yield from ()
        return function(*args, **keywords)

    return steps


# ---- methods -------------------------------------------------------------------------------------


class Runner(Protocol):
    """A client of threads, which takes the steps of its operations."""

    def _run_steps(self, steps: Steps[T], /) -> T: ...


def operation(steps: Callable[Concatenate[C, P], Steps[T]]) -> Callable[Concatenate[C, P], T]:
    """Make an operation a public method of a client of threads: called, it is run, and its result
    is returned.

    `steps_of` gives the operation back, for other operations and for the loop's clients.
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
    """The operation that a method, made by `operation`, runs."""
    steps: Callable[Concatenate[C, P], Steps[T]] = method.__wrapped__  # type: ignore[attr-defined]
    return steps


# ---- runners -------------------------------------------------------------------------------------


class Progress:
    """One operation on its way, for a runner: `advance` until `is_done`.

    What a wait or a call of the user's raised is given to the operation with the next `advance`.
    """

    __slots__ = ("_answer", "_error", "_steps", "is_done", "result")

    def __init__(self, steps: Steps[Any]) -> None:
        self._steps = steps
        self._answer: Any = None
        self._error: BaseException | None = None
        self.is_done = False
        self.result: Any = None

    def advance(self) -> Wait | Invoke | None:
        """Resume the operation; returns what it waits for, None when it is done. Raises what the
        operation raises.
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
            error = None  # else it would hold this frame, which its traceback names

    def answer(self, result: Any) -> None:
        """The call that the operation asked for returned this."""
        self._answer = result

    def fail(self, error: BaseException) -> None:
        """The wait, or the call that the operation asked for, raised this."""
        self._error = error


def run(steps: Steps[T], sleep: Sleep) -> T:
    """Take the steps of an operation in this thread, sleeping where it waits. Raises what the
    operation raises.
    """
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
                    progress.answer(requested.function(*requested.args))
            except BaseException as error:
                progress.fail(error)
        result: T = progress.result
        return result
    finally:
        steps.close()


def run_at_once(steps: Steps[T]) -> T:
    """The result of an operation that has nothing to wait for. Raises RuntimeError when it has."""
    return run(steps, _refuse_to_sleep)


def _refuse_to_sleep(_until_ns: int | None) -> None:
    raise RuntimeError("an operation that was to end at once has something to wait for")


def run_on(connection: Connection, steps: Steps[T], lock: threading.RLock | None = None) -> T:
    """Take the steps of an operation in this thread; where it waits, sleep on the connection.

    `lock`: the owner's, held once; others may have it, and close the connection, during a sleep.
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
    """Send a request and wait for its answer in this thread; repeat it when the connection is
    lost, or the appliance cannot take it now. `lock`: as of `run_on`.

    Raises NotReachableError when no connection came about within `connect_timeout_ms` (None:
    `timeout_ms`), RequestTimeoutError, ClientClosedError, or what the answer says.
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
    """`call_now` with JSON both ways. Raises what it does, and MalformedRequestError for an answer
    that is not JSON.
    """
    steps = call_json(connection, api, request, timeout_ms, connect_timeout_ms)
    return run_on(connection, steps, lock)
