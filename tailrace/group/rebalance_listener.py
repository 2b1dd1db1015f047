"""What a program is told when its consumer's partitions change.

Owner: the caller of `poll`, `unsubscribe` or `close`, inside which all of this is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.core.errors import InvalidRequestError
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import callable_of


class RebalanceListener:
    """Told, inside `poll`, when a consumer of a group gets partitions and loses them. Override what
    is needed:

        class Saves(tailrace.RebalanceListener):
            def on_partitions_revoked(self, revoked):
                consumer.commit()

        consumer.subscribe(["orders"], listener=Saves())

    Each method is given a list of TopicPartitions, never an empty one; with an AsyncConsumer it may
    be a coroutine. An exception that it raises reaches the caller of `poll`, once, and the change
    has happened all the same.
    """

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> Any:
        """These go to another consumer when this returns: the last moment to commit. They can still
        be asked for their position.
        """

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> Any:
        """These are read from now on: from their committed offsets, unless this seeks."""

    def on_partitions_lost(self, lost: list[TopicPartition]) -> Any:
        """These belong to others already, and nothing of them can be committed. Calls
        `on_partitions_revoked` where it is not overridden, as Kafka's.
        """
        return self.on_partitions_revoked(lost)


class ConsumerRebalanceListener(RebalanceListener):
    """A RebalanceListener under kafka-python's and Java's name."""


RebalanceCallback = Callable[[list[TopicPartition]], Any]


class RebalanceCallbacks:
    """The three calls, of a listener or of single functions; None: nobody wants it."""

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
    listener: Any, consumer: Any, on_assign: Any, on_revoke: Any, on_lost: Any
) -> RebalanceCallbacks:
    """The calls that `subscribe` was given: a listener (kafka-python's serve too), or functions
    that take the consumer first, as confluent-kafka's. Raises InvalidRequestError.
    """
    if listener is None:
        given = {"on_assign": on_assign, "on_revoke": on_revoke, "on_lost": on_lost}
        called = {
            name: None if one is None else callable_of(name, one) for name, one in given.items()
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
    if isinstance(listener, type) or not any(
        hasattr(listener, name) for name in ("on_partitions_revoked", "on_partitions_assigned")
    ):
        raise InvalidRequestError(
            f"listener is {listener!r:.100}; it takes a RebalanceListener, an object and not its "
            "class"
        )
    names = ("on_partitions_revoked", "on_partitions_assigned", "on_partitions_lost")
    return RebalanceCallbacks(*(getattr(listener, name, None) for name in names))


def _with_consumer(call: Callable[..., Any] | None, consumer: Any) -> RebalanceCallback | None:
    return None if call is None else lambda partitions: call(consumer, partitions)
