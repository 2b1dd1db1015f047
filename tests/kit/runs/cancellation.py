"""A task that is cancelled at each of its waits, one after the other.

Owner: one test, in one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class CancelledAt:
    """`await CancelledAt(coroutine, 3)`: the task that awaits it is cancelled at the coroutine's
    wait 3. `was_made`: there was such a wait. Wait 0 is before its first step, so that there is one
    also where the appliance answers before the client has looked.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], number: int) -> None:
        self._coroutine = coroutine
        self._number = number
        self.was_made = False

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._coroutine.__await__()
        number = 0
        try:
            waits_for = None
            while True:
                if number == self._number:
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
                    self.was_made = True
                number += 1
                try:
                    given = yield waits_for
                except BaseException as error:
                    waits_for = steps.throw(error)
                else:
                    waits_for = steps.send(given)
        except StopIteration as end:
            result: T = end.value
            return result
