"""A member of a group in an event loop: heartbeats by the loop, rebalances inside the consumer's awaited methods.

The loop watches the heartbeats' connection beside the reader's, so they go on while the program awaits anything; code that holds the loop for longer than
session_timeout_ms loses the membership, as it stops everything else in the loop.

Owner: one event loop's thread.
Invariants: one task at a time makes the steps of a rebalance, each in the order that `tailrace.groups.group_reading` says.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tailrace.aio.driver import Driver, LoopClient
from tailrace.errors import TailraceError, UnknownTopicError
from tailrace.groups.driver import Heartbeats
from tailrace.groups.group_reading import LEAVE_WAIT_NS, GroupReading
from tailrace.groups.listener import Hook
from tailrace.groups.membership import POLLING_NS, Change, ChangeKind
from tailrace.groups.offsets import Offsets
from tailrace.groups.progress import CLOSE_COMMIT_MS
from tailrace.records import TopicPartition


class HeartbeatDriver(Driver):
    """Heartbeats in the event loop."""

    def __init__(self, kind: str, client: LoopClient, beats: Heartbeats, on_news: Callable[[], None]) -> None:
        """`on_news`: called when the consumer has something to look at."""
        super().__init__(kind, client, beats.connection)
        self._beats = beats
        self._on_news = on_news

    def look_after(self) -> None:
        """Take in what has come, and send what is due."""
        self._beats.step()
        if self._beats.membership.has_news:
            self._on_news()

    def due_ns(self) -> int | None:
        """When the next step is due though nothing comes."""
        return None if self._is_closed or self.connection.fatal is not None else self._beats.next_ns()


class LoopGroup:
    """See the module's docstring. `group`: what the plain consumer does; `driver`: of the reader's connection."""

    def __init__(self, kind: str, client: LoopClient, group: GroupReading, driver: Driver) -> None:
        self.group = group
        self.driver = driver
        self._beats = HeartbeatDriver(kind, client, group.beats, driver.wake_watchers)
        self._stepping = asyncio.Lock()
        self._stepper: asyncio.Task[Any] | None = None
        """The task that makes a step, and in which a listener may ask for another."""
        self._waiting_count = 0
        group.leaves_rebalances = True

    def enter(self) -> None:
        """Heartbeats belong to the loop that the consumer works in."""
        self._beats.enter()

    def enter_to_close(self) -> None:
        """As `Driver.enter_to_close`."""
        self._beats.enter_to_close()

    def settle(self) -> None:
        """After anything that may have used the heartbeats' connection."""
        self._beats.settle()

    def detach(self) -> None:
        """Heartbeats are over."""
        self._beats.detach()

    def forget(self) -> None:
        """The program has lost its consumer."""
        self._beats.forget()

    def begin_to_wait(self) -> None:
        """A task waits for records: the consumer is being polled."""
        self.group.beats.step()  # it may have come too late
        self._waiting_count += 1
        self.go_on_waiting()

    def go_on_waiting(self) -> None:
        """It has looked, and goes on."""
        self.group.membership.polled_ns = POLLING_NS

    def end_wait(self) -> None:
        """It waits no more."""
        self._waiting_count -= 1
        if not self._waiting_count:
            self.group.membership.polled_ns = self.driver.connection.now_ns()

    # ---- rebalances ------------------------------------------------------------------------------------------------------------------------

    async def step(self, give_back: Callable[[list[TopicPartition]], None]) -> None:
        """All steps of a rebalance that can be made now. `give_back`: called with partitions before they are given up. Raises as `GroupReading.step`."""
        if not self.group.is_rebalance_due(self.driver.connection.now_ns()):
            return
        async with self._alone():
            self.group.hear_news()
            raised: Exception | None = None
            try:
                while not self.group.waits_to_retry and (change := self.group.next_change()) is not None:
                    try:
                        await self.make(change, give_back)
                    except Exception as error:
                        raised = raised or error
                await self.driver.run(self.group.look_at_catalog)
            except BaseException:
                self.group.membership.has_news = True
                raise
            finally:
                self.settle()
            self.group.raise_after(raised)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Steps are made by one task at a time. A listener that is told of one is in its task: what it asks for is done at once."""
        task = asyncio.current_task()
        if self._stepper is task:
            yield
            return
        async with self._stepping:
            self._stepper = task
            try:
                yield
            finally:
                self._stepper = None

    async def make(self, change: Change, give_back: Callable[[list[TopicPartition]], None]) -> None:
        """One step."""
        group = self.group
        if change.kind is ChangeKind.ASSIGN:
            await self._assign(change)
            return
        keys = group.partitions.keys_of(change)
        give_back(keys)
        try:
            if change.kind is ChangeKind.LOSE:
                group.say_lost(change, keys)
                await _tell(group.hooks.lost, keys)
            else:
                await self.commit_before_revoking(keys)
                await _tell(group.hooks.revoked, keys)
        finally:
            group.drop(change, keys)
            self.settle()

    async def _assign(self, change: Change) -> None:
        group = self.group
        try:
            infos = await self.driver.run(lambda: group.infos_of(change))
        except BaseException as error:
            group.put_back(change)
            if isinstance(error, UnknownTopicError):
                return
            raise
        keys = group.partitions.take(change, infos)
        self.settle()
        await _tell(group.hooks.assigned, keys)

    # ---- offsets ---------------------------------------------------------------------------------------------------------------------------

    async def commit(self, offsets: Offsets, timeout_ms: float) -> None:
        """`GroupReading.commit`, awaited."""
        commit = self.group.progress.begin_commit(offsets, timeout_ms)
        while True:
            with self.driver.watching() as wait:
                try:
                    until_ns = self.group.progress.commit_step(commit)
                finally:
                    self.driver.settle()
                if until_ns is None:
                    break
                await wait(until_ns)
        self.settle()
        self.group.progress.end_commit(commit)

    async def commit_before_revoking(self, keys: list[TopicPartition]) -> None:
        """`GroupReading.commit_before_revoking`, awaited."""
        offsets = self.group.progress.to_commit_before_revoking(keys)
        if offsets is None:
            return
        try:
            await self.commit(offsets, CLOSE_COMMIT_MS)
        except TailraceError as error:
            self.group.progress.say_not_committed(error)

    # ---- ends ------------------------------------------------------------------------------------------------------------------------------

    async def unsubscribe(self, give_back: Callable[[list[TopicPartition]], None]) -> None:
        """`GroupReading.unsubscribe`, awaited."""
        async with self._alone():
            try:
                with self.group.giving_up() as is_first:
                    if is_first:
                        await self.make(self.group.last_change(), give_back)
            finally:
                self.group.leave()
                self.settle()

    async def close(self, keys: list[TopicPartition], *, autocommit: bool, is_handled: bool) -> None:
        """`GroupReading.close`, awaited. `keys`: what is assigned. Everything taken ahead has been given back."""
        self.group.begin_to_close(autocommit=autocommit, is_handled=is_handled)
        try:
            if self.group.is_subscribed:
                await self.unsubscribe(lambda _: None)
            else:
                await self.commit_before_revoking(keys)
        finally:
            try:
                await self._wait_until_left()
            finally:
                self.detach()
                self.group.end()

    async def _wait_until_left(self) -> None:
        until_ns = self.driver.connection.now_ns() + LEAVE_WAIT_NS
        while not self.group.has_left and self.driver.connection.now_ns() < until_ns:
            with self._beats.watching() as wait:
                if not self.group.has_left:
                    await wait(until_ns)


async def _tell(hook: Hook | None, keys: list[TopicPartition]) -> None:
    if hook is None or not keys:
        return
    told: Any = hook(list(keys))
    if inspect.isawaitable(told):
        await _result_of(told)


async def _result_of(told: Awaitable[Any]) -> None:
    await told
