"""Expiry of committed offsets: of groups without members for `offsets.retention.minutes`, and of
deleted topics.

Owner: the service.
Invariants:
- An offset expires when its group has had no member, and no commit has renewed it, for the
  retention; or when its topic is known to be deleted, and not kept in the bin.
- A group is deleted with its last offset. A group without offsets is deleted EMPTY_KEPT_MS after
  its last member has gone.
- Work is done in slices of SLICE rows.
- All time is elapsed time (`shm.runtime.elapsed_time`), so that changes of the wall clock have no
  effect.
"""

from __future__ import annotations

from collections.abc import Callable

from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.messages import TopicImage
from appliance.groups.store.group_store import GroupStore

SWEEP_NS = 60_000_000_000
"""Interval between sweeps."""
SLICE_NS = 5_000_000
"""Interval between the slices of a sweep."""
SLICE = 500
TOPICS_AT_ONCE = 20
EMPTY_KEPT_MS = 600_000


class OffsetExpiry:
    """Sweeps the store for expired offsets and empty groups."""

    def __init__(
        self, store: GroupStore, topics: TopicImage, limits: GroupLimits, now_ns: int
    ) -> None:
        self._store = store
        self._topics = topics
        self._limits = limits
        self._due_ns = now_ns + SWEEP_NS
        self._behind_group_id = 0
        self._known = self._ids()
        self._deleted: list[str] = []
        """Ids of deleted topics whose offsets are still to be deleted."""

    @property
    def _retention_ms(self) -> int:
        return self._limits.offsets_retention_minutes * 60_000

    def topics_changed(self, now_ns: int) -> None:
        known = self._ids()
        gone = self._known - known
        self._known = known
        if gone:
            self._deleted = sorted({*self._deleted, *gone} - known)
            self._due_ns = min(self._due_ns, now_ns + SLICE_NS)

    def _ids(self) -> set[str]:
        """Topics whose offsets stay."""
        return {*(topic.topic_id for topic in self._topics.topics()), *self._topics.kept()}

    def is_due(self, now_ns: int) -> bool:
        return now_ns >= self._due_ns

    def next_deadline_ns(self) -> int | None:
        return self._due_ns

    def rolled_back(self) -> None:
        """Restart the sweep, since a rollback has restored the rows that this step deleted."""
        self._behind_group_id = 0

    def step(self, now_ns: int, elapsed_ms: int, is_unused: Callable[[int], bool]) -> list[int]:
        """Sweep one slice. Returns the ids of groups to delete. `is_unused`: called with a group id
        without members in the store; True when the current step has not changed that. Raises
        StorageError, DiskFullError.
        """
        if self._deleted:
            self._delete_topic(now_ns, elapsed_ms)
            return []
        has_more = self._behind_group_id == 0 and self._delete_unknown(elapsed_ms)
        empty = self._store.groups_empty_since(
            elapsed_ms - min(EMPTY_KEPT_MS, self._retention_ms), self._behind_group_id, SLICE
        )
        cutoff_ms = elapsed_ms - self._retention_ms
        gone = [
            group_id
            for group_id, empty_elapsed_ms, has_offsets in empty
            if is_unused(group_id)
            and (
                not has_offsets
                or (
                    empty_elapsed_ms <= cutoff_ms
                    and not self._store.expire_offsets(group_id, cutoff_ms)
                )
            )
        ]
        self._behind_group_id = empty[-1][0] if len(empty) == SLICE else 0
        self._due_ns = now_ns + (SLICE_NS if self._behind_group_id or has_more else SWEEP_NS)
        return gone

    def _delete_unknown(self, elapsed_ms: int) -> bool:
        """Delete offsets of topics that were deleted while this process did not run. Returns
        whether there may be more. They are kept for the retention, since a lost catalog may be
        restored.
        """
        unknown = [
            topic_id for topic_id in self._store.all_offset_topics() if topic_id not in self._known
        ]
        counts = [
            self._store.delete_topic_offsets(topic_id, elapsed_ms - self._retention_ms, SLICE)
            for topic_id in unknown[:TOPICS_AT_ONCE]
        ]
        return SLICE in counts

    def _delete_topic(self, now_ns: int, elapsed_ms: int) -> None:
        if self._store.delete_topic_offsets(self._deleted[0], elapsed_ms, SLICE) < SLICE:
            self._deleted.pop(0)
        self._due_ns = now_ns + SLICE_NS
