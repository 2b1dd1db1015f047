"""A relay before an appliance's address, for tests of clients that lose their connections: it ends
them all, takes none for a while, and takes them again.

Owner: one test; the relay's event loop runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from tests.kit.processes import HANG_LIMIT_S

READ_BYTES = 1 << 16


class Relay:
    """A context manager; `address` is what clients are given."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def __enter__(self) -> Relay:
        self._thread.start()
        self.restore()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_LIMIT_S)
        self._loop.close()

    def cut(self) -> None:
        """End all connections, and take no others."""
        self._run(self._cut())

    def restore(self) -> None:
        """Take connections."""
        self._run(self._listen())

    def _run(self, steps: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(steps, self._loop).result(HANG_LIMIT_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._on_client, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        while self._writers:
            await asyncio.sleep(0)

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(*self._target)
        both = {writer, to_writer}
        self._writers |= both
        try:
            pumps = [
                asyncio.ensure_future(_pump(reader, to_writer)),
                asyncio.ensure_future(_pump(to_reader, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for each in both:
                each.transport.abort()
            await asyncio.wait(pumps)
        finally:
            self._writers -= both


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one side has ended
