"""The methods of an AsyncConsumer that are about its group: those of `tailrace.group_methods`, awaited.

Owner: one event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from tailrace.arguments import callable_of, timeout_ms_of
from tailrace.errors import InvalidRequestError
from tailrace.group_methods import NO_GROUP
from tailrace.records import ConsumerGroupMetadata, OffsetAndMetadata, Record, TopicPartition

if TYPE_CHECKING:
    from tailrace.aio.consumer import LoopConsumer
    from tailrace.aio.driver import Driver
    from tailrace.aio.group import LoopGroup


class AsyncGroupMethods:
    """A part of AsyncConsumer; see the module's docstring."""

    _consumer: LoopConsumer
    _driver: Driver
    _group: LoopGroup | None
    _topics: list[str]

    async def _ready(self) -> None:
        raise NotImplementedError

    async def _operate(self, operation: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError

    def _give_back(self, keys: Iterable[TopicPartition] | None = None) -> None:
        raise NotImplementedError

    async def assign(self, partitions: list[TopicPartition]) -> None:
        """Read exactly these partitions."""
        raise NotImplementedError

    async def _loop_group(self) -> LoopGroup:
        await self._ready()
        if self._group is None:
            raise InvalidRequestError(NO_GROUP)
        return self._group

    async def subscribe(
        self,
        topics: str | Iterable[str] | None = None,
        pattern: Any = None,
        listener: Any = None,
        *,
        on_assign: Callable[..., Any] | None = None,
        on_revoke: Callable[..., Any] | None = None,
        on_lost: Callable[..., Any] | None = None,
    ) -> None:
        """As `Consumer.subscribe`. The listener's methods, and the functions, may be coroutines; they run inside `poll` and what else awaits records."""
        self._driver.enter()
        if isinstance(topics, (list, tuple, set, frozenset)) and not topics and pattern is None:
            await self.unsubscribe()
            return
        from tailrace.groups.listener import hooks_of
        from tailrace.groups.subscription import subscription_of

        subscription = subscription_of(topics, pattern)
        hooks = hooks_of(listener, self, on_assign, on_revoke, on_lost)
        self._topics = []
        if self._group is not None:
            await self._operate(self._group.group.subscribe, subscription, hooks)
            self._group.settle()
        elif subscription.patterns or hooks.revoked or hooks.assigned or hooks.lost:
            raise InvalidRequestError(f"{NO_GROUP}. Without one, subscribe() takes names of topics alone")
        else:
            await self._operate(self._consumer.subscribe, subscription.names)
        self._driver.wake_watchers()

    async def unsubscribe(self) -> None:
        """As `Consumer.unsubscribe`."""
        self._driver.enter()
        self._topics = []
        if self._group is not None and self._group.group.is_subscribed:
            await self._group.unsubscribe(self._give_back)
        else:
            await self.assign([])

    async def subscription(self) -> set[str]:
        """The names of the topics that are subscribed to."""
        self._driver.enter()
        return self._consumer.subscription()

    async def consumer_group_metadata(self) -> ConsumerGroupMetadata:
        """Who this consumer is in its group."""
        return (await self._loop_group()).group.metadata()

    async def memberid(self) -> str:
        """The member id that this consumer has in its group."""
        return (await self._loop_group()).group.metadata().member_id

    async def commit(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | Record | None = None,
        timeout_ms: float | None = None,
        *,
        message: Record | None = None,
        asynchronous: bool = False,
    ) -> None:
        """As `Consumer.commit`; in an `async for`, of the records so far."""
        loop_group = await self._loop_group()
        group, wanted = self._consumer.offsets_to_commit(offsets, message)
        if asynchronous:
            group.commit_async(wanted, None)
            self._driver.settle()
        else:
            await loop_group.commit(wanted, self._consumer.settings.request_timeout_ms if timeout_ms is None else timeout_ms_of(timeout_ms))

    async def commit_async(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | Record | None = None,
        callback: Callable[[dict[TopicPartition, OffsetAndMetadata], Exception | None], Any] | None = None,
    ) -> None:
        """As `Consumer.commit_async`: the callback, a plain function, is called by a later `poll`, `commit` or `close`."""
        await self._loop_group()
        called = None if callback is None else callable_of("callback", callback)
        group, wanted = self._consumer.offsets_to_commit(offsets, None)
        group.commit_async(wanted, called)
        self._driver.settle()

    @overload
    async def committed(self, partitions: TopicPartition) -> OffsetAndMetadata | None: ...

    @overload
    async def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]: ...

    async def committed(
        self, partitions: TopicPartition | Iterable[TopicPartition]
    ) -> OffsetAndMetadata | dict[TopicPartition, OffsetAndMetadata | None] | None:
        """As `Consumer.committed`."""
        await self._loop_group()
        found: OffsetAndMetadata | dict[TopicPartition, OffsetAndMetadata | None] | None
        found = await self._operate(self._consumer.committed, partitions)
        return found
