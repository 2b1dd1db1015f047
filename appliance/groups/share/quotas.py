"""Quotas of all share groups together: members, subscriptions, partitions.

Owner: ShareService.
Invariants: the sums are recounted at most every COUNT_NS. Joins in between are added, leaves are
    not subtracted, so the sums are never too low.
"""

from __future__ import annotations

from collections.abc import Collection

from appliance.groups.base.limits import (
    MEMBERS_IN_ALL_MAX,
    SHARED_PARTITIONS_MAX,
    SUBSCRIPTIONS_MAX_BYTES,
)
from appliance.groups.base.messages import TopicImage
from appliance.groups.share.group.share_group import ShareGroup
from appliance.groups.share.group.subscriptions import subscription_bytes
from tailrace.core.errors import GroupFullError

COUNT_NS = 1_000_000_000


class Quotas:
    """The sums of all share groups, checked against their limits."""

    def __init__(self, topics: TopicImage) -> None:
        self._topics = topics
        self._counted_ns = -COUNT_NS
        self._members = self._partitions = self._subscription_bytes = 0

    def reserve(
        self,
        groups: Collection[ShareGroup],
        group: ShareGroup | None,
        names: tuple[str, ...],
        *,
        is_new: bool,
        now_ns: int,
    ) -> None:
        """Add a new member, or a new subscription, to these topics. Raises GroupFullError."""
        if now_ns - self._counted_ns >= COUNT_NS:
            self._counted_ns = now_ns
            self._members = sum(len(one.members) for one in groups)
            self._partitions = sum(len(one.partitions) for one in groups)
            self._subscription_bytes = sum(one.subscriptions.size_bytes() for one in groups)
        found = [topic for name in names if (topic := self._topics.by_name(name)) is not None]
        seen = group.partitions if group is not None else ()
        more = sum(topic.partition_count for topic in found if (topic.topic_id, 0) not in seen)
        more_bytes = 0
        if group is None or names not in group.subscriptions:
            more_bytes = subscription_bytes(names, sum(topic.partition_count for topic in found))
        if is_new and self._members >= MEMBERS_IN_ALL_MAX:
            raise GroupFullError(
                f"all share groups together have {self._members} members; an appliance serves at "
                f"most {MEMBERS_IN_ALL_MAX}"
            )
        if more and self._partitions + more > SHARED_PARTITIONS_MAX:
            raise GroupFullError(
                f"all share groups together read {self._partitions} partitions, and {more} more "
                f"exceed the limit of {SHARED_PARTITIONS_MAX}: "
                "subscribe to fewer topics, or delete unused share groups"
            )
        if self._subscription_bytes + more_bytes > SUBSCRIPTIONS_MAX_BYTES:
            raise GroupFullError(
                f"the subscriptions of all share members take {self._subscription_bytes} bytes: "
                "subscribe to fewer topics"
            )
        self._members += is_new
        self._partitions += more
        self._subscription_bytes += more_bytes
