"""A queue worked off by coroutines: `tailrace.ShareConsumer`, its methods awaited, and `async for record in consumer`.

The event loop watches the connections, makes the heartbeats and writes dead letters; there are no threads. Code that holds the loop for longer than
session_timeout_ms loses the membership, as it stops everything else in the loop.

Owner: one event loop's thread.
Invariants: those of `tailrace.share.work`. An await that is cancelled loses nothing: what was read is handed out by the next call, what was said is sent then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Never, TypeVar, Unpack

from tailrace.aio.client import AsyncClient
from tailrace.aio.dead_letters import AsyncDeadLetters
from tailrace.aio.driver import IN_A_LOOP, Answers, Driver, Question
from tailrace.aio.group import HeartbeatDriver
from tailrace.arguments import timeout_ms_of, whole
from tailrace.client_log import logger
from tailrace.errors import ClientClosedError, TailraceError
from tailrace.other_names import SHARE_CONSUMER_ELSEWHERE, OtherNames, refuse_keywords
from tailrace.protocol.wire import Api
from tailrace.records import Record
from tailrace.share.records import ShareRecord
from tailrace.share.settings import ShareConsumerOptions, ShareConsumerSettings
from tailrace.share.work import NS_PER_MS, ShareWork
from tailrace.share_consumer import CLOSE_COMMIT_MS, LEAVE_WAIT_NS, LOOP_POLL_MS, settings_of

T = TypeVar("T")


class LoopShareWork(ShareWork):
    """A share consumer's work, whose questions an event loop answers."""

    answers = Answers()

    def __init__(self, settings: ShareConsumerSettings) -> None:
        super().__init__(settings, IN_A_LOOP, self.call)

    def call(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        """The answer, where it is known."""
        return self.answers.take(Question(api, request, self.settings.request_timeout_ms, None))


class AsyncShareConsumer(AsyncClient, OtherNames):
    """`tailrace.ShareConsumer` for coroutines: the same arguments, settings, methods and errors; each method is awaited.

        async with AsyncShareConsumer("jobs", bootstrap="tcp://127.0.0.1:7420", group_id="workers") as consumer:
            async for record in consumer:
                await work(record.value)

    Several tasks may use it, each record goes to one of them; then acknowledge each record, with share_acknowledgement_mode "explicit": the implicit mode
    accepts with a poll what the poll before has returned, whichever task made it.
    """

    _elsewhere: ClassVar[dict[str, str]] = {
        **SHARE_CONSUMER_ELSEWHERE,
        "getmany": "write poll(timeout_ms=..., max_records=...)",
        "getone": "write `async for record in consumer`, or poll(max_records=1)",
    }

    def __init__(
        self,
        *topics: str | Iterable[str] | Mapping[str, Any],
        bootstrap: str | Sequence[str] | None = None,
        **settings: Unpack[ShareConsumerOptions],
    ) -> None:
        """As `ShareConsumer`; the topics are looked up by `start()`, or the first use. Raises InvalidSettingError."""
        self._names, self.settings = settings_of(topics, bootstrap, settings)
        s = self.settings
        kind = type(self).__name__
        self._work = LoopShareWork(s)
        self._driver = Driver(kind, self._work, self._work.connection)
        self._beats = HeartbeatDriver(kind, self._work, self._work.thread.beats, self._driver.wake_watchers)
        self._letters = AsyncDeadLetters(s.bootstrap, s.client_id, self._work.call, self._driver.run, s.dead_letter_timeout_ms)
        self._starting = asyncio.Lock()
        self._polling = asyncio.Lock()
        """One task at a time acquires."""
        self._is_closing = False

    async def start(self) -> None:
        """Subscribe to the topics named at construction. Raises UnknownTopicError, NotReachableError; the consumer is closed then."""
        self._driver.enter()
        try:
            await self._ready()
        except BaseException:
            await self.close()
            raise

    async def _ready(self) -> None:
        self._driver.enter()
        self._beats.enter()
        if not self._names:
            return
        async with self._starting:
            names = self._names
            if names:  # else another task was the first
                await self._subscribe(names)
                if self._names is names:
                    self._names = []

    async def _subscribe(self, topics: Any) -> None:
        try:
            await self._operate(self._work.subscribe, topics)
        finally:
            self._settle()
        self._driver.wake_watchers()

    def _settle(self) -> None:
        """After anything that may have used a connection."""
        self._driver.settle()
        self._beats.settle()

    def _do(self, step: Callable[..., T], *arguments: Any) -> T:
        """Something that does not wait."""
        try:
            return step(*arguments)
        finally:
            self._settle()

    # ---- the group -----------------------------------------------------------------------------------------------------------------------

    async def subscribe(self, topics: str | Iterable[str]) -> None:
        """As `ShareConsumer.subscribe`, also in the place of the topics named at construction."""
        self._driver.enter()
        self._beats.enter()
        self._names = []
        await self._subscribe(topics)

    async def unsubscribe(self) -> None:
        """As `ShareConsumer.unsubscribe`."""
        self._driver.enter()
        self._names = []
        await self._leave()
        self._work.forget()

    async def subscription(self) -> set[str]:
        """As `ShareConsumer.subscription`."""
        await self._ready()
        return set(self._work.subscribed)

    async def acquisition_lock_timeout_ms(self) -> int | None:
        """As `ShareConsumer.acquisition_lock_timeout_ms`."""
        self._driver.enter()
        return self._work.lock_ms or None

    # ---- records -------------------------------------------------------------------------------------------------------------------------

    async def poll(self, timeout_ms: float = 0, max_records: int | None = None, **others: Never) -> list[ShareRecord]:
        """Acquire up to `max_records` records (default max_poll_records); awaits the first for at most `timeout_ms`. Raises what `ShareConsumer.poll` does."""
        if others:
            refuse_keywords("poll", others)
        limit = self.settings.max_poll_records if max_records is None else whole("max_records", max_records, 1)
        timeout = timeout_ms_of(timeout_ms)
        await self._ready()
        deadline_ns = self._work.now_ns() + int(timeout * NS_PER_MS)
        try:
            async with asyncio.timeout(timeout / 1000):
                await self._polling.acquire()
        except TimeoutError:  # another task polls for so long
            return []
        try:
            await self._fill(limit, deadline_ns)
            return self._work.hand_out(limit)
        finally:
            self._polling.release()

    async def _fill(self, limit: int, deadline_ns: int) -> None:
        """Have records to hand out."""
        work = self._work
        work.begin_poll()
        await asyncio.sleep(0)  # records that are there already must not keep the loop's other tasks waiting
        await self._write_given_up(with_rejected=True)
        while True:
            self._driver.enter()
            with self._driver.watching() as wait:
                try:
                    self._do(work.turn, limit - len(work.ahead))
                    for look_up in work.to_look_up():
                        await self._driver.run(look_up)
                    work.read(limit - len(work.ahead))
                    await self._write_given_up(with_rejected=False)
                    self._do(work.check_reachable)
                except TailraceError as error:
                    work.fail(error)
                if work.is_done(limit) or work.now_ns() >= deadline_ns:
                    return
                await self._until(wait, self._do(work.wait_until_ns, deadline_ns))

    async def _until(self, wait: Callable[[int | None], Any], until_ns: int) -> None:
        if until_ns > self._work.now_ns():
            await wait(until_ns)
        else:
            await asyncio.sleep(0)

    async def _write_given_up(self, *, with_rejected: bool) -> TailraceError | None:
        """As `ShareConsumer` does it."""
        book = self._work.undeliverable
        given_up = book.take(with_rejected=with_rejected)
        if not given_up:
            return None
        try:
            letters = await self._driver.run(lambda: book.letters(given_up, self._work.reading.fresh_info))
            outcomes = await self._letters.write(letters)
        except BaseException:
            book.put_back(given_up)
            raise
        return book.ended(given_up, outcomes)

    async def __aiter__(self) -> AsyncIterator[ShareRecord]:
        """Records without end, until the consumer is closed; what is said of `ShareConsumer.__iter__` holds."""
        work = self._work
        await self._ready()
        while self._is_open():
            try:
                async with self._polling:
                    if not work.ahead:
                        await self._fill(self.settings.max_poll_records, work.now_ns() + LOOP_POLL_MS * NS_PER_MS)
                    found = work.hand_out(1)
            except ClientClosedError:
                if self._is_open():
                    raise
                return
            for record in found:
                yield record
                if not self._is_open():
                    return
                self._do(work.accept_in_loop, record)

    def _is_open(self) -> bool:
        """Another task may close it while one awaits."""
        return not self._is_closing

    # ---- acknowledging -------------------------------------------------------------------------------------------------------------------

    async def acknowledge(self, record: Record, outcome: str = "accept", *, reason: str | None = None) -> None:
        """As `ShareConsumer.acknowledge`; nothing is waited for."""
        self._work.acknowledge(record, outcome, reason)

    async def commit(self, timeout_ms: float | None = None) -> None:
        """As `ShareConsumer.commit`; other tasks may poll meanwhile."""
        timeout = self.settings.request_timeout_ms if timeout_ms is None else timeout_ms_of(timeout_ms)
        await self._ready()
        self._work.begin_commit()
        deadline_ns = self._work.now_ns() + int(timeout * NS_PER_MS)
        failure = await self._write_given_up(with_rejected=True)
        await self._flush(deadline_ns)
        refused = self._work.requests.take_refused()
        if refused is not None:
            raise refused
        if failure is not None:
            raise failure

    async def _flush(self, deadline_ns: int) -> None:
        work, number = self._work, 0
        while True:
            self._driver.enter()
            with self._driver.watching() as wait:
                number = self._do(work.flush_step, number)
                if work.is_flushed(number):
                    return
                await self._until(wait, work.flush_again_ns(deadline_ns))

    # ---- the end -------------------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """As `ShareConsumer.close`. Who waits for records gets ClientClosedError, an `async for` ends."""
        self._driver.enter_to_close()
        if self._is_closing:
            return
        self._is_closing = True
        try:
            if self._work.connection.is_usable:
                self._beats.enter_to_close()
                await self._leave()
        finally:
            self._beats.detach()
            self._end(self._close_connections)
            await self._letters.close()

    def _close_connections(self) -> None:
        self._work.thread.stop()
        self._work.connection.close()

    async def _leave(self) -> None:
        if not self._work.connection.is_ready:
            return
        try:
            await self._write_given_up(with_rejected=True)
            await self._flush(self._work.now_ns() + CLOSE_COMMIT_MS * NS_PER_MS)
        except TailraceError as error:
            logger.warning("share_close_without_commit group=%s reason=%s: the records come again", self.settings.group_id, error)
        refused = self._work.requests.take_refused()
        if refused is not None:
            logger.warning("share_acknowledgements_refused group=%s %s", self.settings.group_id, refused.detail)
        self._do(self._work.leave)
        until_ns = self._work.now_ns() + LEAVE_WAIT_NS
        while not self._work.has_left() and self._work.now_ns() < until_ns:
            with self._beats.watching() as wait:
                if not self._work.has_left():
                    await wait(until_ns)

    def __del__(self) -> None:
        if hasattr(self, "_beats") and not self._is_closed:
            self._beats.forget()
        super().__del__()

    async def metrics(self) -> dict[str, int]:
        """As `ShareConsumer.metrics`."""
        self._driver.enter()
        return self._work.metrics(self._letters.count)
