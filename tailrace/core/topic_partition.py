"""TopicPartition: the topic and number that identify a partition."""

from __future__ import annotations

from typing import Any, NamedTuple


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


_new_tuple = tuple.__new__


def _without_offset(
    _cls: type[TopicPartition], topic: str, partition: int, *more: Any, offset: Any = None
) -> TopicPartition:
    """Create a TopicPartition. Raises TypeError for an offset, which confluent-kafka's holds."""
    if more or offset is not None:
        shown = f"TopicPartition({topic!r:.100}, {partition!r:.100})"
        at = f"{more[0] if more else offset!r:.100}"
        raise TypeError(
            f"a TopicPartition holds no offset: write seek({shown}, {at}) to read from there, or "
            f"commit({{{shown}: {at}}})"
        )
    return _new_tuple(_cls, (topic, partition))


_without_offset.__name__ = _without_offset.__qualname__ = "TopicPartition"
TopicPartition.__new__ = (  # type: ignore[method-assign]
    _without_offset  # type: ignore[assignment]  # NamedTuple forbids it in the class body
)
