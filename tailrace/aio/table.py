"""`tailrace.Table` for asyncio: lookups are plain calls, for they read memory; waiting is awaited.

Owner: one event loop's thread. The table's own thread reads the topic; it reaches the loop by
`call_soon_threadsafe` alone.
Invariants: a table that is garbage before it was closed gives a ResourceWarning.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

from tailrace.client.config.from_context import FromContext
from tailrace.consumer.table.changes import TableChange
from tailrace.consumer.table.settings import TableOptions
from tailrace.consumer.table.table import Offsets, Table, built
from tailrace.core.errors import ClientClosedError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition


class AsyncTable(FromContext):
    """The latest value of each key of a topic, in memory and kept up to date.

        async with AsyncTable("users", bootstrap=address) as users:
            users["u1"], users.get("u2"), "u3" in users, len(users)

    The arguments, lookups and errors are those of `tailrace.Table`; `on_change` is called by the
    event loop.
    """

    def __init__(
        self,
        topic: str,
        bootstrap: str | Sequence[str] | None = None,
        **settings: Unpack[TableOptions],
    ) -> None:
        """Raises InvalidSettingError. Nothing is read before `start`."""
        self.topic, self.settings = topic, built(bootstrap, settings)
        self._bootstrap, self._given = bootstrap, settings
        self._table: Table | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Begin to read the topic, in the running event loop. Raises ClientClosedError."""
        if self._is_closed:
            raise ClientClosedError(f"the table of topic {self.topic!r} is closed")
        if self._table is None:
            given = dict(self._given)
            if self.settings.on_change is not None:
                given["on_change"] = self._on_change(
                    asyncio.get_running_loop(), self.settings.on_change
                )
            self._table = Table(self.topic, bootstrap=self._bootstrap, **given)  # type: ignore[arg-type]

    async def close(self) -> None:
        """End the table. A second call does nothing."""
        self._is_closed = True
        if self._table is not None:
            await asyncio.to_thread(self._table.close)

    async def stop(self) -> None:
        """Call `close()`. The name is aiokafka's."""
        await self.close()

    async def __aenter__(self) -> AsyncTable:
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if getattr(self, "_table", None) is not None and not self._is_closed:
            warnings.warn(
                "unclosed AsyncTable; use `async with`, or await its close()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    async def ready(self, timeout: float | None = None) -> None:
        """See `tailrace.Table.ready`. Starts the table."""
        await self.start()
        table = self._started()
        await self._wait(table._readiness(timeout))

    async def wait_until(self, offsets: Offsets, timeout: float | None = None) -> None:
        """See `tailrace.Table.wait_until`."""
        await self._wait(self._started()._arrival(offsets, timeout))

    async def _wait(self, waits: Iterator[float]) -> None:
        """Wait as a generator of deadlines (`time.monotonic`) asks, and step it at each change."""
        shared = self._started()._shared
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            loop.call_soon_threadsafe(changed.set)

        shared.listeners.add(listener)
        try:
            while True:
                changed.clear()
                with shared.lock:
                    deadline_s = next(waits, None)
                if deadline_s is None:
                    return
                try:
                    async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                        await changed.wait()
                except TimeoutError:
                    pass
        finally:
            shared.listeners.discard(listener)

    # ---- lookups ---------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        """The value of a key. Raises KeyError."""
        return self._started()[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, `default` if the table does not have it."""
        return self._started().get(key, default)

    def __contains__(self, key: Any) -> bool:
        return key in self._started()

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._started())

    def record(self, key: Any) -> Record | None:
        """See `tailrace.Table.record`."""
        return self._started().record(key)

    def __iter__(self) -> Iterator[Any]:
        """The keys of a snapshot, in no order."""
        return iter(self._started())

    def keys(self) -> Iterator[Any]:
        """The keys of a snapshot, in no order."""
        return iter(self)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The keys and values of a snapshot, in no order."""
        return self._started().items()

    def values(self) -> Iterator[Any]:
        """The values of a snapshot, in no order."""
        return self._started().values()

    def positions(self) -> dict[TopicPartition, int]:
        """The offset behind the last applied record of each partition."""
        return self._started().positions()

    def metrics(self) -> dict[str, int]:
        """See `tailrace.Table.metrics`."""
        return self._started().metrics()

    def _on_change(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[TableChange], object]
    ) -> Callable[[TableChange], None]:
        """A function that has the loop call `function`. An exception is logged and counted."""

        def call(change: TableChange) -> None:
            try:
                function(change)
            except Exception:
                table = self._started()
                with table._shared.lock:
                    table._shared.note_callback_error(self.topic, change.partition, change.offset)

        def ask(change: TableChange) -> None:
            loop.call_soon_threadsafe(call, change)

        return ask

    def _started(self) -> Table:
        if self._table is None:
            raise ClientClosedError(
                f"the table of topic {self.topic!r} "
                + ("is closed" if self._is_closed else "has not begun: await start(), or ready()")
            )
        return self._table
