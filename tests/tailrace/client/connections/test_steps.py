"""Operations as steps: both runners resume an operation where it waits, and end it there with what
ended the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from tailrace.aio.event_loop import LOOP_RUNTIME, LoopConnection
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import (
    Invoke,
    Steps,
    Wait,
    Wakeup,
    invoke,
    lifted,
    run,
    run_at_once,
)
from tailrace.core.errors import InvalidRequestError

T = TypeVar("T")


class Interrupt(BaseException):
    """Raised in a wait, as a signal's handler raises KeyboardInterrupt."""


class Operation:
    """Waits `count` times, then calls `function`; says how it ended."""

    def __init__(self, count: int, function: Callable[..., Any] | None = None) -> None:
        self.count = count
        self.function = function
        self.resumed = 0
        self.begun = 0
        self.ended_by: list[str] = []

    def steps(self, *args: Any) -> Steps[Any]:
        self.begun += 1
        try:
            for _ in range(self.count):
                yield Wait(None)
                self.resumed += 1
            result = None
            if self.function is not None:
                result = yield from invoke(self.function, *args)
        except BaseException as error:
            self.ended_by.append(type(error).__name__)
            raise
        self.ended_by.append("return")
        return result


def run_in_thread(steps: Steps[T], sleep: Callable[[int | None], object]) -> T:
    return run(steps, sleep)


def run_in_loop(steps: Steps[T], sleep: Callable[[int | None], object]) -> T:
    """The loop is woken by hand: each wait ends as `sleep` does."""

    async def main() -> T:
        connection = Connection("tcp://127.0.0.1:9", "steps", LOOP_RUNTIME)
        loop_connection = LoopConnection("Steps", connection)
        try:
            loop_connection.enter()
            task = asyncio.ensure_future(loop_connection.run_steps(steps))
            while not task.done():
                await asyncio.sleep(0)
                try:
                    if not task.done():
                        sleep(None)
                except Interrupt:
                    task.cancel()
                loop_connection.wake_watchers()
            return await task
        finally:
            loop_connection.detach()
            connection.close()

    return asyncio.run(main())


RUNNERS = pytest.mark.parametrize("run_it", [run_in_thread, run_in_loop])
Runner = Callable[[Steps[Any], Callable[[int | None], object]], Any]


def no_sleep(_until_ns: int | None) -> None:
    pass


@RUNNERS
def test_an_operation_is_resumed_and_never_begun_again(run_it: Runner) -> None:
    operation = Operation(3, lambda given: given * 2)
    assert run_it(operation.steps(21), no_sleep) == 42
    assert (operation.begun, operation.resumed, operation.ended_by) == (1, 3, ["return"])


@RUNNERS
def test_an_interrupted_wait_ends_the_operation_at_that_wait(run_it: Runner) -> None:
    operation = Operation(3)
    waits = []

    def sleep(until_ns: int | None) -> None:
        waits.append(until_ns)
        if len(waits) == 2:
            raise Interrupt

    steps = operation.steps()
    with pytest.raises((Interrupt, asyncio.CancelledError)):
        run_it(steps, sleep)
    assert operation.resumed == 1
    assert operation.ended_by in (["Interrupt"], ["CancelledError"])
    with pytest.raises(StopIteration):
        next(steps)


@RUNNERS
def test_what_users_code_raises_is_raised_in_the_operation(run_it: Runner) -> None:
    def refuse() -> None:
        raise ValueError("no")

    operation = Operation(1, refuse)
    with pytest.raises(ValueError, match="no"):
        run_it(operation.steps(), no_sleep)
    assert operation.ended_by == ["ValueError"]


@RUNNERS
def test_an_operation_may_go_on_after_users_code_has_raised(run_it: Runner) -> None:
    def steps() -> Steps[str]:
        try:
            yield from invoke(int, "x")
        except ValueError:
            yield Wait(None)
            found: str = yield from invoke(str, 7)
            return found
        raise AssertionError

    assert run_it(steps(), no_sleep) == "7"


@RUNNERS
def test_an_error_of_the_operation_reaches_the_caller(run_it: Runner) -> None:
    def steps() -> Steps[None]:
        yield Wait(None)
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        run_it(steps(), no_sleep)


def test_a_loop_awaits_what_users_code_returns() -> None:
    async def later(given: int) -> int:
        await asyncio.sleep(0)
        return given + 1

    assert run_in_loop(Operation(1, later).steps(41), no_sleep) == 42


def test_a_bell_that_rings_before_the_wait_is_not_missed() -> None:
    bell = Wakeup()

    def steps() -> Steps[str]:
        bell.ring()
        yield Wait(None, bell)
        return "woken"

    async def main() -> str:
        connection = Connection("tcp://127.0.0.1:9", "steps", LOOP_RUNTIME)
        loop_connection = LoopConnection("Steps", connection)
        try:
            loop_connection.enter()
            return await loop_connection.run_steps(steps())
        finally:
            loop_connection.detach()
            connection.close()

    assert asyncio.run(main()) == "woken"


def test_a_bell_wakes_its_own_operation_only() -> None:
    bells = [Wakeup(), Wakeup()]
    has_come = [False, False]
    looks = [0, 0]

    def steps(which: int) -> Steps[None]:
        while not has_come[which]:
            looks[which] += 1
            yield Wait(None, bells[which])

    async def main() -> None:
        connection = Connection("tcp://127.0.0.1:9", "steps", LOOP_RUNTIME)
        loop_connection = LoopConnection("Steps", connection)
        try:
            loop_connection.enter()
            tasks = [
                asyncio.ensure_future(loop_connection.run_steps(steps(which))) for which in (0, 1)
            ]
            await asyncio.sleep(0)
            looks[:] = [0, 0]
            has_come[:] = [True, True]
            bells[0].ring()
            loop_connection.wake_watchers()
            await tasks[0]
            assert not tasks[1].done()
            assert looks == [0, 0]
            bells[1].ring()
            await tasks[1]
        finally:
            loop_connection.detach()
            connection.close()

    asyncio.run(main())


def test_a_bell_that_has_rung_is_waited_for_again() -> None:
    """An answer that asks for patience rings, too: the operation then waits for another."""
    bell = Wakeup()
    looks = 0

    def steps() -> Steps[None]:
        nonlocal looks
        bell.ring()
        while looks < 2:
            yield Wait(None, bell)
            looks += 1

    async def main() -> None:
        connection = Connection("tcp://127.0.0.1:9", "steps", LOOP_RUNTIME)
        loop_connection = LoopConnection("Steps", connection)
        try:
            loop_connection.enter()
            task = asyncio.ensure_future(loop_connection.run_steps(steps()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert (looks, task.done()) == (1, False)
            bell.ring()
            await task
        finally:
            loop_connection.detach()
            connection.close()

    asyncio.run(main())


def test_a_runner_that_is_interrupted_itself_closes_the_operation() -> None:
    operation = Operation(1)
    steps = operation.steps()

    class Odd:
        """In the place of a Wait: looking at it raises."""

    def odd() -> Steps[None]:
        try:
            yield Odd()  # type: ignore[misc]
        finally:
            operation.ended_by.append("closed")

    with pytest.raises(AssertionError):
        run(odd(), no_sleep)
    assert operation.ended_by == ["closed"]
    steps.close()


def test_steps_without_a_wait_end_at_once() -> None:
    assert run_at_once(lifted(divmod)(7, 2)) == (3, 1)
    with pytest.raises(RuntimeError, match="something to wait for"):
        run_at_once(Operation(1).steps())


def test_invoke_says_what_is_to_be_called() -> None:
    steps = invoke(print, "a", "b")
    assert next(steps) == Invoke(print, ("a", "b"))
    steps.close()


def test_a_coroutine_that_the_users_code_returns_is_refused_where_nothing_awaits_it() -> None:
    """A lambda hides the coroutine function that it calls: nothing of it ran."""

    async def waiting() -> None:
        raise AssertionError

    with pytest.raises(InvalidRequestError, match="waiting was called and returned a coroutine"):
        run_at_once(invoke(lambda: waiting()))
