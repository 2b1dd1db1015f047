"""The base class of the asyncio clients: start, close, and running a plain client's operations.

Owner: one event loop's thread.
Invariants: a client that is garbage before it was closed gives a ResourceWarning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from tailrace.aio.event_loop import LoopConnection
from tailrace.client.config.from_context import FromContext
from tailrace.client.connections.steps import Steps

Result = TypeVar("Result")


class AsyncClient(FromContext):
    """A client for `async with`, or for `start()` and `close()`."""

    _loop_connection: LoopConnection
    _is_closed = False

    async def start(self) -> None:
        """Start in the running event loop. The first call of any other method starts it too. Raises
        InvalidRequestError if the client works in another loop, ClientClosedError.
        """
        self._loop_connection.enter()

    async def close(self) -> None:
        """Close the client. Calls that wait raise ClientClosedError. A second call does nothing."""
        raise NotImplementedError

    def _end(self, close_plain_client: Callable[[], None]) -> None:
        self._loop_connection.enter_to_close()
        self._is_closed = True
        self._loop_connection.detach()
        close_plain_client()

    async def stop(self) -> None:
        """Call `close()`. The name is aiokafka's."""
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
        """Run an operation in the loop."""
        try:
            self._loop_connection.enter()
            return await self._loop_connection.run_steps(steps)
        finally:
            steps.close()
