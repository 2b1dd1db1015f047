"""Rebalance listeners: the program's callbacks for changes of its partitions.

Owner: the caller of `poll`, `unsubscribe` or `close`, inside which they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.core.errors import InvalidRequestError
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import callable_of


class RebalanceListener:
    """Called inside `poll` when a consumer of a group gets or loses partitions. Override what is
    needed:

        class Saves(tailrace.RebalanceListener):
            def on_partitions_revoked(self, revoked):
                consumer.commit()

        consumer.subscribe(["orders"], listener=Saves())

    Each method gets a list of TopicPartitions that is never empty. With an AsyncConsumer it may be
    a coroutine. The caller of `poll` gets an exception that it raises once, and the partitions have
    changed nevertheless. A signal (KeyboardInterrupt) or a cancellation that ends
    `on_partitions_revoked` or `on_partitions_assigned` leaves the change to the next `poll`, which
    calls it from its beginning.
    """

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> Any:
        """Called before these partitions go to another consumer: the last moment to commit. Their
        positions can still be read.
        """

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> Any:
        """Called before these partitions are read: from their committed offsets, unless this
        seeks.
        """

    def on_partitions_lost(self, lost: list[TopicPartition]) -> Any:
        """Called when these partitions belong to others already, and can no longer be committed.
        Calls `on_partitions_revoked` unless it is overridden, as in Kafka.
        """
        return self.on_partitions_revoked(lost)


class ConsumerRebalanceListener(RebalanceListener):
    """The RebalanceListener under kafka-python's and Java's name."""


RebalanceCallback = Callable[[list[TopicPartition]], Any]


class RebalanceCallbacks:
    """The three callbacks, of a listener or of single functions; None: no callback."""

    def __init__(
        self,
        revoked: RebalanceCallback | None = None,
        assigned: RebalanceCallback | None = None,
        lost: RebalanceCallback | None = None,
    ) -> None:
        self.revoked = revoked
        self.assigned = assigned
        self.lost = lost if lost is not None else revoked


def callbacks_of(
    listener: Any,
    consumer: Any,
    on_assign: Any,
    on_revoke: Any,
    on_lost: Any,
    *,
    is_awaited: bool = False,
) -> RebalanceCallbacks:
    """The callbacks from the arguments of `subscribe`: a listener (also kafka-python's), or
    functions that take the consumer first, as in confluent-kafka. They may be coroutine functions
    if what they return `is_awaited`. Raises InvalidRequestError.
    """
    if listener is None:
        given = {"on_assign": on_assign, "on_revoke": on_revoke, "on_lost": on_lost}
        called = {
            name: None if one is None else callable_of(name, one, is_awaited=is_awaited)
            for name, one in given.items()
        }
        return RebalanceCallbacks(
            *(
                _with_consumer(called[name], consumer)
                for name in ("on_revoke", "on_assign", "on_lost")
            )
        )
    if on_assign is not None or on_revoke is not None or on_lost is not None:
        raise InvalidRequestError(
            "subscribe() takes a listener, or on_assign, on_revoke and on_lost, not both"
        )
    if not is_listener(listener):
        raise InvalidRequestError(
            f"listener is {listener!r:.100}; it takes a RebalanceListener, an object and not its "
            "class"
        )
    names = ("on_partitions_revoked", "on_partitions_assigned", "on_partitions_lost")
    methods = [getattr(listener, name, None) for name in names]
    for name, method in zip(names, methods, strict=True):
        if method is not None:
            callable_of(f"the listener's {name}", method, is_awaited=is_awaited)
    return RebalanceCallbacks(*methods)


def is_listener(given: Any) -> bool:
    """True for an object with the methods of a listener."""
    return not isinstance(given, type) and any(
        hasattr(given, name) for name in ("on_partitions_revoked", "on_partitions_assigned")
    )


def _with_consumer(call: Callable[..., Any] | None, consumer: Any) -> RebalanceCallback | None:
    return None if call is None else lambda partitions: call(consumer, partitions)
