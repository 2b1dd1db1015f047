"""What the three asynchronous clients have in common: they begin, end, and make their plain
client's operations awaitable.

Owner: one event loop's thread.
Invariants: a client that is not closed when it is forgotten says so (ResourceWarning).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from tailrace.aio.event_loop import LoopConnection
from tailrace.client.steps import Steps

Result = TypeVar("Result")


class AsyncClient:
    """Use it with `async with`, or await `start()` and `close()`; `stop()` is another name for
    that.
    """

    _loop_connection: LoopConnection
    _is_closed = False

    async def start(self) -> None:
        """Begin to work in the running event loop. Any other method does so too when it is the
        first. Raises InvalidRequestError when the client works in another loop, ClientClosedError.
        """
        self._loop_connection.enter()

    async def close(self) -> None:
        """End it. Who waits elsewhere gets ClientClosedError. Nothing happens the second time."""
        raise NotImplementedError

    def _end(self, close_plain_client: Callable[[], None]) -> None:
        self._loop_connection.enter_to_close()
        self._is_closed = True
        self._loop_connection.detach()
        close_plain_client()

    async def stop(self) -> None:
        """`close()`, by aiokafka's name."""
        await self.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if hasattr(self, "_loop_connection") and not self._is_closed:
            warnings.warn(
                f"unclosed {type(self).__name__}; use `async with`, or await its close()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
            self._loop_connection.forget()

    async def _run(self, steps: Steps[Result]) -> Result:
        """Take the steps of an operation in the loop."""
        try:
            self._loop_connection.enter()
            return await self._loop_connection.run_steps(steps)
        finally:
            steps.close()
