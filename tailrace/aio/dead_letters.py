"""Dead letters written by an event loop: `tailrace.dead_letters`, awaited.

Owner: one event loop's thread; the producer, which is made with the first letter, works in the same loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from tailrace.aio.producer import AsyncHandle, AsyncProducer
from tailrace.dead_letters import AGAIN_NS, KNOWN_WITHIN_NS, Call, Letter, cut, dead_letter_topic, prepare, producer_settings, sendable
from tailrace.errors import RecordTooLargeError, TailraceError
from tailrace.topics import TopicInfo


class AsyncDeadLetters:
    """Writes dead letters."""

    def __init__(
        self, bootstrap: str, client_id: str, call: Call, run: Callable[[Callable[[], int | None]], Awaitable[int | None]], timeout_ms: int
    ) -> None:
        """`run`: makes an operation whose questions go through `call`. `timeout_ms`: how long one attempt to write may take."""
        self._settings = producer_settings(bootstrap, client_id, timeout_ms)
        self._call = call
        self._run = run
        self._producer: AsyncProducer | None = None
        self._partitions: dict[str, int] = {}
        """Dead-letter topics that are known to exist -> how many partitions they have."""
        self.count = 0
        """Written since construction."""

    async def write(self, letters: Sequence[Letter]) -> list[TailraceError | None]:
        """As `DeadLetters.write`."""
        sent: list[AsyncHandle | TailraceError] = []
        refused: dict[str, TailraceError] = {}
        for letter in letters:
            error = refused.get(letter.info.name)
            if error is None:
                try:
                    count = await self._prepare(letter.info)
                except TailraceError as met:
                    error = refused[letter.info.name] = met
            sent.append(await self._send(letter, count) if error is None else error)
        outcomes = [one if isinstance(one, TailraceError) else await self._outcome(one) for one in sent]
        self.count += outcomes.count(None)
        if any(outcomes):
            self._partitions.clear()  # a topic may have been deleted: it is made anew
        return outcomes

    async def _prepare(self, info: TopicInfo) -> int:
        name = dead_letter_topic(info)
        if name not in self._partitions:
            give_up_ns = time.monotonic_ns() + KNOWN_WITHIN_NS
            while (count := await self._run(lambda: prepare(self._call, info))) is None and time.monotonic_ns() < give_up_ns:
                await asyncio.sleep(AGAIN_NS / 1e9)
            self._partitions[name] = count or 0
        return self._partitions[name]

    async def _send(self, letter: Letter, count: int) -> AsyncHandle | TailraceError:
        if self._producer is None:
            self._producer = AsyncProducer(**self._settings)
        try:
            try:
                return await self._producer.send(*sendable(letter, count))
            except RecordTooLargeError:
                return await self._producer.send(*cut(letter, count))
        except TailraceError as error:
            return error

    @staticmethod
    async def _outcome(handle: AsyncHandle) -> TailraceError | None:
        try:
            await handle
        except TailraceError as error:
            return error
        return None

    async def close(self) -> None:
        """End the producer."""
        if self._producer is not None:
            await self._producer.close()
