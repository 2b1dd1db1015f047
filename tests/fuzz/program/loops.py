"""The loop over a client, `for record in client`, of both kinds of clients.

A turn is a generator: it takes a record, yields what a call of the client returns (an awaitable of
asyncio's client) and gets the answer back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from tests.fuzz.program.clients import LOOPED, BodyError

Turn = Callable[[Any], Generator[Any, Any, None]]


def run_loop(client: Any, count: int, end: str, turn: Turn) -> Any:
    """Run `count` turns. `end`: "exception" raises BodyError from the last one."""
    left = count
    for record in client:
        calls, answer = turn(record), None
        with contextlib.suppress(StopIteration):
            while True:
                answer = calls.send(answer)
        left -= 1
        if not left:
            _end(end)
            break
    return LOOPED


async def run_loop_async(client: Any, count: int, end: str, turn: Turn) -> Any:
    """`run_loop` over a client of asyncio."""
    left = count
    async for record in client:
        calls, answer = turn(record), None
        with contextlib.suppress(StopIteration):
            while True:
                answer = await calls.send(answer)
        left -= 1
        if not left:
            _end(end)
            break
    return LOOPED


def _end(end: str) -> None:
    if end == "exception":
        raise BodyError
