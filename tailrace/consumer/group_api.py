"""The group methods of a consumer. They use `tailrace.group`, which a consumer without a group does
not import.

Owner: one Consumer, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.steps import Steps, T, operation
from tailrace.core.errors import InvalidRequestError
from tailrace.core.records import ConsumerGroupMetadata, OffsetAndMetadata, Record
from tailrace.core.topic_names import SUBSCRIPTIONS_MAX, retry_topics
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import callable_of, is_one_partition, partition_list, timeout_ms_of

if TYPE_CHECKING:
    from tailrace.client.topics.offsets import Offsets
    from tailrace.client.tracing.read_spans import ReadSpans
    from tailrace.consumer.retry_topic import RetryTopicProducer
    from tailrace.group.group_coordinator import ConsumerCoordinator

NO_GROUP = "this consumer has no group: give it a group_id"


def check_retries_are_read(group: ConsumerCoordinator) -> None:
    """Raise InvalidRequestError if the consumer has too many topics to read their retry topics."""
    count = len(group.topics())
    names = 1 + len(retry_topics("topic", group.group_id))
    if names * count > SUBSCRIPTIONS_MAX:
        raise InvalidRequestError(
            f"this consumer subscribes to {count} topics; with more than "
            f"{SUBSCRIPTIONS_MAX // names} it cannot read their retry topics too. Subscribe to "
            "fewer topics, or use several consumers"
        )


class GroupApi:
    """The group methods, with Kafka's names. Without a `group_id` each raises InvalidRequestError,
    except `subscribe` with names, and `unsubscribe`.
    """

    settings: ConsumerSettings
    _group: ConsumerCoordinator | None
    _retries: RetryTopicProducer | None
    _spans: ReadSpans | None

    def _make_retries(self) -> RetryTopicProducer:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def _public(self) -> Any:
        """The consumer that the program uses."""
        return self

    def _run_steps(self, steps: Steps[T], /) -> T:
        raise NotImplementedError

    def _read_all_of(self, topics: list[str]) -> Steps[None]:
        raise NotImplementedError

    def _assign(self, partitions: Sequence[TopicPartition]) -> Steps[None]:
        raise NotImplementedError

    def __repr__(self) -> str:
        """The group, the member id and the number of partitions. Works on a closed or half-made
        consumer too.
        """
        name, group, fetch_loop = (
            type(self).__name__,
            self.__dict__.get("_group"),
            self.__dict__.get("_fetch_loop"),
        )
        if group is None or fetch_loop is None:
            return f"<{name} without a group, {self._count_text(fetch_loop)}>"
        return (
            f"<{name} of group {group.group_id!r}, member {group.metadata().member_id}, "
            f"{self._count_text(fetch_loop)}>"
        )

    @staticmethod
    def _count_text(fetch_loop: Any) -> str:
        count = 0 if fetch_loop is None else len(fetch_loop.cursors)
        return f"{count} partition{'' if count == 1 else 's'}"

    def _group_of(self) -> ConsumerCoordinator:
        self._check_open()
        if self._group is None:
            raise InvalidRequestError(NO_GROUP)
        return self._group

    def assignment(self) -> list[TopicPartition]:
        """The assigned partitions."""
        raise NotImplementedError

    # ---- retries ---------------------------------------------------------------------------------

    @operation
    def retry_later(self, record: Record, delay: Any) -> Steps[int]:
        """Deliver a record to this group again after `delay` (a timedelta, seconds, or text such as
        "30s"). Returns when the copy is on the disk, so that the record may be committed. The copy
        comes from the group's retry topic, with headers for its origin and attempt
        (`tailrace.consumer.retry_topic`). Consumers of the group read that topic automatically.

        Returns the number of the coming attempt. 0: it was retried max_retry_attempts times, and
        went to the dead-letter topic. Raises InvalidRequestError, NotSupportedError (a topic with a
        schema), RecordTooLargeError (with the added headers the record exceeds the largest
        max.message.bytes), UnknownTopicIdError (a consumer with deserializers fetches the record
        again, and its topic was deleted), and the errors of writing.
        """
        group = self._group_of()
        check_retries_are_read(group)
        if self._retries is None:
            self._retries = self._make_retries()
        attempt = yield from self._retries.retry(record, delay)
        if attempt and not group.is_subscribed and self.assignment():
            yield from self._assign(self.assignment())  # adds the retry topic, which may be new
        return attempt

    # ---- subscribing -----------------------------------------------------------------------------

    @operation
    def subscribe(
        self,
        topics: str | Iterable[str] | None = None,
        pattern: Any = None,
        listener: Any = None,
        *,
        on_assign: Callable[..., Any] | None = None,
        on_revoke: Callable[..., Any] | None = None,
        on_lost: Callable[..., Any] | None = None,
    ) -> Steps[None]:
        """Share these topics with the group's other consumers from the next `poll` on. Replaces the
        last subscription.

        `topics`: names. A topic that does not exist yet is read once it exists. `pattern`: a
        regular expression, as text or compiled, matched from the beginning of each name. Later
        topics are matched too, but retry and dead-letter topics only if the pattern contains
        `retry` or `dlq`. A name that begins with ^ is a pattern. `listener`: a RebalanceListener,
        also as the second argument; or confluent-kafka's functions `on_assign`, `on_revoke` and
        `on_lost`, called with (consumer, partitions). Without a group_id all partitions of the
        named topics are read. Raises InvalidRequestError.
        """
        self._check_open()
        if isinstance(topics, (list, tuple, set, frozenset)) and not topics and pattern is None:
            yield from self._unsubscribe()
            return
        from tailrace.group.rebalance_listener import callbacks_of, is_listener
        from tailrace.group.subscription import subscription_of

        if listener is None and is_listener(pattern):
            pattern, listener = None, pattern
        subscription = subscription_of(topics, pattern)
        public = self._public()
        callbacks = callbacks_of(
            listener, public, on_assign, on_revoke, on_lost, is_awaited=public is not self
        )
        if self._group is not None:
            yield from self._group.subscribe(subscription, callbacks)
        elif subscription.patterns or callbacks.revoked or callbacks.assigned or callbacks.lost:
            raise InvalidRequestError(
                f"{NO_GROUP}. Without one, subscribe() takes topic names only, no pattern and no "
                "listener"
            )
        else:
            yield from self._read_all_of(subscription.names)

    @operation
    def unsubscribe(self) -> Steps[None]:
        """Give up all partitions, and leave the group. Commits as `close` does and calls the
        listener. Raises what the listener raises.
        """
        return self._unsubscribe()

    def _unsubscribe(self) -> Steps[None]:
        self._check_open()
        if self._group is not None and self._group.is_subscribed:
            yield from self._group.unsubscribe()
        else:
            yield from self._assign([])

    def subscription(self) -> set[str]:
        """The names of the subscribed topics, with those that a pattern matches now; empty after
        `assign`.
        """
        self._check_open()
        return set() if self._group is None else self._group.topics()

    def group_metadata(self) -> ConsumerGroupMetadata:
        """The group id, member id, member epoch and instance id, for
        `Producer.send_offsets_to_transaction`.
        """
        return self._group_of().metadata()

    def consumer_group_metadata(self) -> ConsumerGroupMetadata:
        """`group_metadata()` under the name of confluent-kafka."""
        return self.group_metadata()

    def memberid(self) -> str:
        """The member id."""
        return self._group_of().metadata().member_id

    # ---- offsets ---------------------------------------------------------------------------------

    @operation
    def commit(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | Record | None = None,
        timeout_ms: float | None = None,
        *,
        message: Record | None = None,
        asynchronous: bool = False,
    ) -> Steps[None]:
        """Commit the offsets at which the group goes on: `offsets`, for each partition the next
        offset to read; None: behind all delivered records. With a record (or `message=`), behind
        that record. Waits until the commit is durable, for at most `timeout_ms` (default
        request_timeout_ms); with `asynchronous` it does not wait.

        Raises CommitFailedError when a partition has gone to another consumer, which reads it from
        the last committed offset; OffsetOutOfRangeError, UnknownTopicError, RequestTimeoutError,
        NotReachableError.
        """
        group = self._group_of()
        requested = self._offsets_to_commit(group, offsets, message)
        if asynchronous:
            group.position_tracker.commit_async(requested, None)
        else:
            committing = group.position_tracker.commit(
                requested,
                self.settings.request_timeout_ms
                if timeout_ms is None
                else timeout_ms_of(timeout_ms),
            )
            if self._spans is not None:
                committing = self._spans.settling(committing)
            yield from committing

    def commit_async(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | Record | None = None,
        callback: Callable[[dict[TopicPartition, OffsetAndMetadata], Exception | None], Any]
        | None = None,
    ) -> None:
        """`commit` without waiting. Commits are made in order. A later `poll`, `commit` or `close`
        calls `callback(offsets, error)`; error is None once they are durable. Without a callback
        errors are logged.
        """
        group = self._group_of()
        called = None if callback is None else callable_of("callback", callback)
        group.position_tracker.commit_async(self._offsets_to_commit(group, offsets, None), called)

    @staticmethod
    def _offsets_to_commit(
        group: ConsumerCoordinator, offsets: Any, message: Record | None
    ) -> Offsets:
        if isinstance(offsets, Record):
            offsets, message = None, offsets
        if message is not None:
            if offsets is not None or not isinstance(message, Record):
                raise InvalidRequestError(
                    f"commit() got offsets={offsets!r:.100} and message={message!r:.100}; it takes "
                    "offsets, or one record as message=, or neither"
                )
            offsets = {TopicPartition(message.topic, message.partition): message.offset + 1}
        if offsets is None:
            return group.position_tracker.positions()
        if not isinstance(offsets, Mapping):
            raise InvalidRequestError(
                f"{offsets!r:.100} cannot be committed; give a record that poll() has returned "
                "(which commits the records before it in its partition too), a dict such as "
                "{TopicPartition(topic, 0): offset}, or nothing to commit all delivered records"
            )
        from tailrace.client.topics.offsets import offsets_of

        return group.position_tracker.with_epochs(offsets_of(offsets))

    @overload
    def committed(self, partitions: TopicPartition) -> OffsetAndMetadata | None: ...

    @overload
    def committed(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]: ...

    @operation  # type: ignore[misc]  # its signature is that of the overloads
    def committed(self, partitions: TopicPartition | Iterable[TopicPartition]) -> Steps[Any]:
        """The group's committed offset of each partition, assigned or not: an int with `.metadata`
        and `.leader_epoch`, None without a commit. For a single TopicPartition, not in a list, its
        offset alone.
        """
        group = self._group_of()
        requested = partition_list(partitions)
        found = yield from group.committed(requested)
        return found[requested[0]] if is_one_partition(partitions) else found
