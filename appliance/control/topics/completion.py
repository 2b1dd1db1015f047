"""Completion of decided changes: when the flushers have carried one out, and what is noted in the
catalog and published then.

Owner: the controller.
Invariants:
- A change of a topic with hash slots is over when the end of each log that gave slots away is
  known.
- A change that the catalog refuses to note is late, and noted later.
- Whoever sees a topic has been told of its delay log before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from appliance.catalog.catalog import Catalog, PartitionRow, Topic, delay_log_of
from appliance.control.publishing.metadata_publisher import MetadataPublisher
from appliance.control.request_fields import shown_text
from appliance.control.topics.bin import TopicBin
from shm.crash_points import crash_point
from shm.memory.layout import SlotState
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.core.hash_slots import HandOver, missing_sources

logger = logging.getLogger(__name__)

RETRY_NS = 1_000_000_000
"""Interval of retries when the catalog refuses to store a change's end."""


class Completion:
    """Decisions that are carried out, and those that no client waits for."""

    def __init__(
        self,
        catalog: Catalog,
        topics: dict[str, Topic],
        publisher: MetadataPublisher,
        topic_bin: TopicBin,
    ) -> None:
        """`topics`: by name, as the controller knows them; a deleted one is removed here."""
        self._catalog = catalog
        self._topics = topics
        self._publisher = publisher
        self._bin = topic_bin
        self.late: dict[bytes, Topic] = {}
        """Decisions that are not carried out, and that no client waits for."""
        self.retry_at_ns = 0

    def complete_late(self, now_ns: int) -> int:
        """Note the late decisions that are over; returns their number."""
        if not self.late or now_ns < self.retry_at_ns:
            return 0
        found = [topic for topic in self.late.values() if self.is_over(topic)]
        for topic in found:
            del self.late[topic.topic_id]
            self.complete(topic, [], now_ns)
        return len(found)

    def is_over(self, topic: Topic) -> bool:
        """True if the flushers have carried a decision out, or nothing of it is left to carry
        out.
        """
        if self._is_gone(topic):
            return True
        known = self._topics[topic.name]  # a partition may have moved since the decision
        if known.state != "deleting" and self._publisher.awaits_workers_of(known):
            return False  # a flusher that was fed shows the version before that
        for row in known.partitions[: len(topic.partitions)]:
            state = self._publisher.table(row).read(row.slot)
            if state.applied_version < topic.version or state.topic_id != topic.topic_id:
                return False
        if topic.state != "deleting":
            delay_log = delay_log_of(topic, self._topics)
            if delay_log is not None and delay_log.state not in ("active", "deleting"):
                return False
        return topic.state == "deleting" or not any(
            self._publisher.table(row).read(row.slot).state is SlotState.UNREADABLE
            for row in self._without_end(topic)
        )  # the end of its log is unknown, and the slots that it gave away wait for it

    def complete(self, topic: Topic, results: list[dict[str, Any]], now_ns: int) -> None:
        """Note that a decision is carried out. If the catalog refuses, it is late again, and its
        requester gets the reason.
        """
        crash_point("controller.after_apply")

        def not_noted(error: TailraceError) -> None:
            logger.error(
                "change_not_noted topic=%s version=%d error=%r",
                topic.name,
                topic.version,
                error.detail,
            )
            self.late[topic.topic_id] = topic
            self.retry_at_ns = now_ns + RETRY_NS
            for result in results:
                result.update(code=int(error.code), message=shown_text(error.detail))

        try:
            self._note(topic, results, not_noted)
        except TailraceError as error:
            not_noted(error)

    def _is_gone(self, topic: Topic) -> bool:
        known = self._topics.get(topic.name)
        return known is None or known.topic_id != topic.topic_id

    def _note(
        self,
        topic: Topic,
        results: list[dict[str, Any]],
        not_noted: Callable[[TailraceError], None],
    ) -> None:
        """Raises StorageError, DiskFullError."""
        if self._is_gone(topic):
            for result in results:
                result.update(
                    code=int(ErrorCode.UNKNOWN_TOPIC),
                    message="the topic was deleted before the change was carried out",
                )
            return
        if topic.state == "deleting":
            if topic.is_going_to_bin:
                self._bin.put(topic, topic.bin)
            else:
                self._catalog.forget(topic.topic_id)
            self._catalog.afterwards(lambda: self._forget(topic), not_noted)
            return
        self._catalog.mark_active(topic, self._hand_overs(topic))
        known = self._catalog.topic(topic.name)
        self._catalog.afterwards(lambda: self._publish_finished(topic, known, results), not_noted)

    def _forget(self, topic: Topic) -> None:
        if not self._is_gone(topic):
            del self._topics[topic.name]
            self._publisher.placement.release(topic)
            logger.info(
                "topic_deleted topic=%s in_bin=%s",
                topic.name,
                "yes" if topic.is_going_to_bin else "no",
            )

    def _publish_finished(
        self, topic: Topic, known: Topic | None, results: list[dict[str, Any]]
    ) -> None:
        present = self._topics.get(topic.name, topic)
        if (
            known is not None and known.version == topic.version == present.version
        ):  # otherwise a later decision is answered, which may be of the same step
            self._topics[topic.name] = known
            self._publisher.publish_to_readers(known)
        logger.info(
            "topic_changed topic=%s version=%d partitions=%d",
            topic.name,
            topic.version,
            len(topic.partitions),
        )
        for row in topic.partitions:
            reason = self._publisher.table(row).read(row.slot).reason
            if reason:
                for result in results:
                    result.update(
                        code=reason,
                        message=f"partition {row.partition} is offline; see `tailrace status` "
                        "and the log",
                    )

    def _hand_overs(self, topic: Topic) -> dict[int, HandOver]:
        """End offsets of the partitions that gave slots away, where they are not known yet.

        All workers refuse batches of the former map, and no producer has the new one: nothing was
        appended since. After a rebuild of the catalog without these offsets, records appended later
        count too.
        """
        found = {}
        for row in topic.partitions:
            missing = missing_sources(topic.slot_counts, row.partition, row.hand_over)
            if missing:
                rows = [topic.partitions[source] for source in missing]
                ends = [
                    (other.partition, self._publisher.table(other).read(other.slot).log_end_offset)
                    for other in rows
                ]
                found[row.partition] = tuple(sorted((*row.hand_over, *ends)))
        return found

    @staticmethod
    def _without_end(topic: Topic) -> list[PartitionRow]:
        """Partitions that gave slots away and whose end offsets then are unknown."""
        sources = {
            source
            for row in topic.partitions
            for source in missing_sources(topic.slot_counts, row.partition, row.hand_over)
        }
        return [topic.partitions[source] for source in sorted(sources)]
