"""Subscriptions of a share group's members, and the partitions that each stands for.

Owner: one ShareGroup.
Invariants:
- Members with equal subscriptions share the objects, so that a large group costs one list.
- Subscriptions that no member has any more are dropped once they outnumber the members.
"""

from __future__ import annotations

from collections.abc import Mapping

from appliance.groups.base.limits import NAME_BYTES
from appliance.groups.base.messages import Partition, TopicImage
from appliance.groups.share.group.members import ShareMember

SPARE_SUBSCRIPTIONS = 16
PARTITION_BYTES = 72
"""Memory of a partition in a subscription."""


def subscription_bytes(names: tuple[str, ...], partition_count: int) -> int:
    """Memory of a subscription; members with equal ones share it."""
    return NAME_BYTES * len(names) + sum(map(len, names)) + PARTITION_BYTES * partition_count


class Subscriptions:
    """See the module's docstring."""

    def __init__(self, topics: TopicImage) -> None:
        self._topics = topics
        self._known: dict[tuple[str, ...], tuple[tuple[str, ...], list[Partition]]] = {}
        """Subscription -> (the subscription, its partitions)."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, names: tuple[str, ...]) -> bool:
        """True when a member has exactly this subscription."""
        return names in self._known

    def size_bytes(self) -> int:
        """Memory of all of them."""
        return sum(subscription_bytes(names, len(found)) for names, found in self._known.values())

    def topics_changed(self) -> None:
        """Forget the partitions. Apply every member's subscription again."""
        self._known.clear()

    def apply(self, member: ShareMember, members: Mapping[str, ShareMember]) -> bool:
        """Set a member's partitions from its subscription. `members`: all of the group. Returns
        whether they changed.
        """
        known = self._known.get(member.topics)
        if known is None:
            self._drop_unused(members)
            known = self._known[member.topics] = member.topics, self._partitions(member.topics)
        member.topics, found = known
        if found == member.partitions:
            return False
        member.partitions = found
        # members start with different partitions
        member.rotation = len(members) % len(found) if found else 0
        return True

    def _partitions(self, names: tuple[str, ...]) -> list[Partition]:
        topics = [topic for name in names if (topic := self._topics.by_name(name)) is not None]
        return [
            (topic.topic_id, number) for topic in topics for number in range(topic.partition_count)
        ]

    def _drop_unused(self, members: Mapping[str, ShareMember]) -> None:
        if len(self._known) > 2 * len(members) + SPARE_SUBSCRIPTIONS:
            used = {member.topics for member in members.values()}
            self._known = {names: known for names, known in self._known.items() if names in used}
