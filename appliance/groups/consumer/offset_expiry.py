"""Offsets that nobody needs any more: of groups without members for longer than `offsets.retention.minutes`, and of topics that are gone.

Owner: the service.
Invariants: an offset goes only when its group has had no member, and it was not committed anew, for the retention; or when its topic is known to be
    deleted. A group goes with its last offset; one that never had any, EMPTY_KEPT_MS after its last member. Work comes in slices of SLICE rows. A wall clock
    that jumps forward expires nothing: no more time passes here than has really passed since the start.
"""

from __future__ import annotations

from appliance.groups.limits import GroupLimits
from appliance.groups.messages import TopicsView
from appliance.groups.store import GroupStore

NS_PER_MS = 1_000_000
SWEEP_NS = 60_000_000_000
"""How often it is looked."""
SLICE_NS = 5_000_000
"""When the next slice of a sweep comes."""
SLICE = 500
TOPICS_AT_ONCE = 20
EMPTY_KEPT_MS = 600_000


class Expiry:
    """The sweep."""

    def __init__(self, store: GroupStore, topics: TopicsView, limits: GroupLimits, now_ns: int, wall_ms: int) -> None:
        self._store = store
        self._topics = topics
        self._retention_ms = limits.offsets_retention_minutes * 60_000
        self._due_ns = now_ns + SWEEP_NS
        self._ahead_ms = wall_ms - now_ns // NS_PER_MS
        """Of the monotonic clock, at the start."""
        self._behind_group_id = 0
        self._known = {topic.topic_id for topic in topics.topics()}
        self._deleted: list[str] = []
        """Topics that were seen to go, whose offsets are to go."""

    def topics_changed(self, now_ns: int) -> None:
        known = {topic.topic_id for topic in self._topics.topics()}
        gone = self._known - known
        self._known = known
        if gone:
            self._deleted = sorted({*self._deleted, *gone} - known)
            self._due_ns = min(self._due_ns, now_ns + SLICE_NS)

    def is_due(self, now_ns: int) -> bool:
        return now_ns >= self._due_ns

    def next_deadline_ns(self) -> int | None:
        return self._due_ns

    def rolled_back(self) -> None:
        """What was swept in this step is there again: begin anew, with what was deleted while nobody looked."""
        self._behind_group_id = 0

    def step(self, now_ns: int, wall_ms: int) -> list[int]:
        """One slice; returns the ids of groups that are to go. Raises StorageError, DiskFullError."""
        wall_ms = min(wall_ms, self._ahead_ms + now_ns // NS_PER_MS)
        if self._deleted:
            self._delete_topic(now_ns, wall_ms)
            return []
        has_more = self._behind_group_id == 0 and self._delete_unknown(wall_ms)
        empty = self._store.groups_empty_since(wall_ms - min(EMPTY_KEPT_MS, self._retention_ms), self._behind_group_id, SLICE)
        cutoff_ms = wall_ms - self._retention_ms
        gone = [
            group_id
            for group_id, empty_since_ms, has_offsets in empty
            if not has_offsets or (empty_since_ms <= cutoff_ms and not self._store.expire_offsets(group_id, cutoff_ms))
        ]
        self._behind_group_id = empty[-1][0] if len(empty) == SLICE else 0
        self._due_ns = now_ns + (SLICE_NS if self._behind_group_id or has_more else SWEEP_NS)
        return gone

    def _delete_unknown(self, wall_ms: int) -> bool:
        """Offsets of topics that were deleted while this process did not run; returns whether there may be more. They are kept for the retention: a
        catalog may have been lost, and come back.
        """
        unknown = [topic_id for topic_id in self._store.all_offset_topics() if topic_id not in self._known]
        counts = [self._store.delete_topic_offsets(topic_id, wall_ms - self._retention_ms, SLICE) for topic_id in unknown[:TOPICS_AT_ONCE]]
        return SLICE in counts

    def _delete_topic(self, now_ns: int, wall_ms: int) -> None:
        if self._store.delete_topic_offsets(self._deleted[0], wall_ms + self._retention_ms, SLICE) < SLICE:
            self._deleted.pop(0)
        self._due_ns = now_ns + SLICE_NS
