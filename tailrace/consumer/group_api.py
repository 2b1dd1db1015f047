"""The methods of a consumer that are about its group. What they do is in `tailrace.groups`, which a consumer without a group never loads.

Owner: one Consumer, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from tailrace.arguments import callable_of, is_one_partition, partition_list, timeout_ms_of
from tailrace.errors import InvalidRequestError
from tailrace.records import ConsumerGroupMetadata, OffsetAndMetadata, Record, TopicPartition
from tailrace.retry_topics import SUBSCRIPTIONS_MAX
from tailrace.settings import ConsumerSettings

if TYPE_CHECKING:
    from tailrace.groups.group_reading import GroupReading
    from tailrace.groups.offsets import Offsets
    from tailrace.retry_later import RetryLater

NO_GROUP = "this consumer has no group: give it a group_id"


class GroupMethods:
    """Kafka's names. Each raises InvalidRequestError for a consumer without a `group_id`, but `subscribe`, which takes names then, and `unsubscribe`."""

    settings: ConsumerSettings
    _group: GroupReading | None
    _retries: RetryLater | None

    def _make_retries(self) -> RetryLater:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def _read_all_of(self, topics: list[str]) -> None:
        raise NotImplementedError

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read exactly these partitions."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """What a notebook shows: the group, the member, and how much is assigned. Also of one that is closed, or half made."""
        name, group, reading = type(self).__name__, self.__dict__.get("_group"), self.__dict__.get("_reading")
        if group is None or reading is None:
            return f"<{name} without a group, {self._count_text(reading)}>"
        return f"<{name} of group {group.group_id!r}, member {group.metadata().member_id}, {self._count_text(reading)}>"

    @staticmethod
    def _count_text(reading: Any) -> str:
        count = 0 if reading is None else len(reading.cursors)
        return f"{count} partition{'' if count == 1 else 's'}"

    def _group_of(self) -> GroupReading:
        self._check_open()
        if self._group is None:
            raise InvalidRequestError(NO_GROUP)
        return self._group

    # ---- retries ---------------------------------------------------------------------------------------------------------------------

    def retry_later(self, record: Record, delay: Any) -> int:
        """Have a record come to this group again after `delay` (a timedelta, seconds, or text such as "30s"): returns when that is on the disk, so that the
        record may be committed. It comes from the group's retry topic, with headers that say where from, and as which attempt
        (`tailrace.retry_later`); consumers of the group read that topic by themselves.

        Returns the number of the attempt that will be; 0: it has been tried again retry_attempts_max times, and went to the dead-letter topic. Raises
        InvalidRequestError, InvalidTopicNameError (the group's name cannot be part of a topic's), NotSupportedError (a topic with a schema),
        RecordTooLargeError (the headers that are added make it larger than max.message.bytes), and what the appliance refuses to write.
        """
        topics = self._group_of().topics()
        if 2 * len(topics) > SUBSCRIPTIONS_MAX:
            raise InvalidRequestError(
                f"this consumer subscribes to {len(topics)} topics: with more than {SUBSCRIPTIONS_MAX // 2} it does not read their retry topics, too"
            )
        if self._retries is None:
            self._retries = self._make_retries()
        return self._retries.retry(record, delay)

    # ---- subscribing -----------------------------------------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: str | Iterable[str] | None = None,
        pattern: Any = None,
        listener: Any = None,
        *,
        on_assign: Callable[..., Any] | None = None,
        on_revoke: Callable[..., Any] | None = None,
        on_lost: Callable[..., Any] | None = None,
    ) -> None:
        """Read these topics together with the group's other consumers, from the next `poll` on; in the place of what was subscribed to before.

        `topics`: names; those that do not exist yet are read when they do. `pattern`: a regular expression, as text or compiled, matched from the beginning
        of each topic's name; topics that are made later are read, too, but for retry and dead-letter topics, unless it spells `retry` or `dlq`. A name that
        begins with ^ is a pattern. `listener`: a RebalanceListener; or
        confluent-kafka's functions `on_assign`, `on_revoke` and `on_lost`, called with (consumer, partitions). Without a group_id all partitions of the named
        topics are read. Raises InvalidRequestError.
        """
        self._check_open()
        if isinstance(topics, (list, tuple, set, frozenset)) and not topics and pattern is None:
            self.unsubscribe()
            return
        from tailrace.groups.listener import hooks_of
        from tailrace.groups.subscription import subscription_of

        subscription = subscription_of(topics, pattern)
        hooks = hooks_of(listener, self, on_assign, on_revoke, on_lost)
        if self._group is not None:
            self._group.subscribe(subscription, hooks)
        elif subscription.patterns or hooks.revoked or hooks.assigned or hooks.lost:
            raise InvalidRequestError(f"{NO_GROUP}. Without one, subscribe() takes names of topics alone")
        else:
            self._read_all_of(subscription.names)

    def unsubscribe(self) -> None:
        """Read nothing any more, and leave the group. Commits as `close` does, and tells the listener, what it raises is raised."""
        self._check_open()
        if self._group is not None and self._group.is_subscribed:
            self._group.unsubscribe()
        else:
            self.assign([])

    def subscription(self) -> set[str]:
        """The names of the topics that are subscribed to, those that a pattern matches now included; empty after `assign`."""
        self._check_open()
        return set() if self._group is None else self._group.topics()

    def consumer_group_metadata(self) -> ConsumerGroupMetadata:
        """Who this consumer is in its group: the group, its member id and epoch, its instance id."""
        return self._group_of().metadata()

    def memberid(self) -> str:
        """The member id that this consumer has in its group."""
        return self._group_of().metadata().member_id

    # ---- offsets ---------------------------------------------------------------------------------------------------------------------

    def commit(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | Record | None = None,
        timeout_ms: float | None = None,
        *,
        message: Record | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Commit where the group is to go on: `offsets`, of each partition the offset of the next record to read; None: behind all that was handed out. With a
        record (or `message=`), behind that record. Waits until it is durable, for at most `timeout_ms` (default request_timeout_ms); or not, `asynchronous`.

        Raises CommitFailedError when a partition has gone to another consumer meanwhile, which reads it from what was committed before; OffsetOutOfRangeError,
        UnknownTopicError, RequestTimeoutError, NotReachableError.
        """
        group = self._group_of()
        wanted = self._offsets_to_commit(group, offsets, message)
        if asynchronous:
            group.progress.commit_async(wanted, None)
        else:
            group.progress.commit(wanted, self.settings.request_timeout_ms if timeout_ms is None else timeout_ms_of(timeout_ms))

    def commit_async(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | Record | None = None,
        callback: Callable[[dict[TopicPartition, OffsetAndMetadata], Exception | None], Any] | None = None,
    ) -> None:
        """`commit` without waiting. Commits are made in order; `callback(offsets, error)` is called by a later `poll`, `commit` or `close`, error None when
        they are durable. Without a callback the log says what fails.
        """
        group = self._group_of()
        called = None if callback is None else callable_of("callback", callback)
        group.progress.commit_async(self._offsets_to_commit(group, offsets, None), called)

    @staticmethod
    def _offsets_to_commit(group: GroupReading, offsets: Any, message: Record | None) -> Offsets:
        if isinstance(offsets, Record):
            offsets, message = None, offsets
        if message is not None:
            if offsets is not None or not isinstance(message, Record):
                raise InvalidRequestError("commit() takes offsets, or one record as message=, or neither")
            offsets = {TopicPartition(message.topic, message.partition): message.offset + 1}
        if offsets is None:
            return group.progress.positions()
        if not isinstance(offsets, Mapping):
            raise InvalidRequestError(
                f"{offsets!r:.100} cannot be committed; give a record that poll() has returned (what lies before it in its partition is committed, too), "
                "a dict such as {TopicPartition(topic, 0): offset}, or nothing: then all that was handed out is committed"
            )
        from tailrace.groups.offsets import offsets_of

        return group.progress.with_epochs(offsets_of(offsets))

    @overload
    def committed(self, partitions: TopicPartition) -> OffsetAndMetadata | None: ...

    @overload
    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]: ...

    def committed(
        self, partitions: TopicPartition | Iterable[TopicPartition]
    ) -> OffsetAndMetadata | dict[TopicPartition, OffsetAndMetadata | None] | None:
        """What the group has committed of each partition, assigned or not: an int with `.metadata` and `.leader_epoch`, None where nothing is. Of one
        TopicPartition, not in a list, its offset alone.
        """
        group = self._group_of()
        wanted = partition_list(partitions)
        found = group.committed(wanted)
        return found[wanted[0]] if is_one_partition(partitions) else found
