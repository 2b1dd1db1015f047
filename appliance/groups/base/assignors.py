"""Assignors: range, round robin and sticky, as pure functions.

An assignor is called with `members` {member id: MemberView} and `topics` {topic: partition count},
and returns {member id: [(topic, partition), ...]}.

- `range`: assigns each topic's partitions in contiguous ranges to its subscribers. The first
  subscribers get one more when the count does not divide evenly.
- `roundrobin`: assigns partitions one by one, each to the next subscriber of its topic.
- `sticky`: balances loads and moves as few partitions as balance allows. With equal subscriptions
  the shares follow from counts. With unequal ones the least loaded subscriber takes each free
  partition. Then partitions move one at a time while a move makes two loads more equal (after
  Kafka's AbstractStickyAssignor: KIP-54, KIP-429, KIP-341).

Owner: pure.
Invariants:
- Every partition of a subscribed topic has one owner, a subscriber.
- With equal subscriptions loads differ by at most one (round robin, sticky; range: per topic).
- The output does not depend on the order of the input's dictionaries. Members are ordered by
  instance id, then by member id, so that a static member that returns keeps its place.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

STEPS_MAX = 400_000
"""Bound of the work of balancing unequal subscriptions, in partitions and members visited."""
TopicPartition = tuple[str, int]
"""(topic name, partition)."""
Assignment = dict[str, list[TopicPartition]]
"""Member id -> partitions."""


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as an assignor sees it. `owned`: its previous target assignment."""

    topics: frozenset[str]
    instance_id: str | None = None
    owned: Collection[TopicPartition] = ()


Members = Mapping[str, MemberView]
Topics = Mapping[str, int]
Assignor = Callable[[Members, Topics], Assignment]


def _in_order(members: Members) -> list[str]:
    return sorted(
        members,
        key=lambda member_id: (
            members[member_id].instance_id is None,
            members[member_id].instance_id or "",
            member_id,
        ),
    )


def _subscribers(members: Members, topics: Topics) -> dict[str, list[str]]:
    """The subscribers of each existing topic, both in order."""
    order = _in_order(members)
    if len({view.topics for view in members.values()}) == 1:
        return {topic: order for topic in sorted(members[order[0]].topics) if topic in topics}
    found: dict[str, list[str]] = {}
    for member_id in order:
        for topic in members[member_id].topics:
            if topic in topics:
                found.setdefault(topic, []).append(member_id)
    return {topic: found[topic] for topic in sorted(found)}


def range_assignor(members: Members, topics: Topics) -> Assignment:
    """Assign contiguous ranges of each topic's partitions to its subscribers."""
    result: Assignment = {member_id: [] for member_id in members}
    for topic, subscribers in _subscribers(members, topics).items():
        share, more = divmod(topics[topic], len(subscribers))
        first = 0
        for number, member_id in enumerate(subscribers):
            count = share + (number < more)
            result[member_id].extend(
                (topic, partition) for partition in range(first, first + count)
            )
            first += count
    return result


def roundrobin_assignor(members: Members, topics: Topics) -> Assignment:
    """Assign partitions one by one, each to the next subscriber in turn."""
    result: Assignment = {member_id: [] for member_id in members}
    order = _in_order(members)
    place = {member_id: number for number, member_id in enumerate(order)}
    rotation = 0
    for topic, subscribers in _subscribers(members, topics).items():
        # The first subscriber at or behind the member whose turn it is.
        at = next(
            (
                number
                for number, member_id in enumerate(subscribers)
                if place[member_id] >= rotation
            ),
            0,
        )
        for partition in range(topics[topic]):
            chosen = subscribers[at]
            result[chosen].append((topic, partition))
            rotation = (place[chosen] + 1) % len(order)
            at = (at + 1) % len(subscribers)
    return result


def sticky_assignor(members: Members, topics: Topics) -> Assignment:
    """Balance the loads and move as few partitions as possible."""
    subscribers = _subscribers(members, topics)
    order = _in_order(members)
    kept, free = _kept(order, members, topics, subscribers)
    active = [
        member_id
        for member_id in order
        if any(topic in subscribers for topic in members[member_id].topics)
    ]
    if all(len(having) == len(active) for having in subscribers.values()):
        _share_out(active, kept, free)
    else:
        _Balance(active, members, kept, subscribers).run(free)
    return {member_id: sorted(kept[member_id]) for member_id in order}


def _kept(
    order: list[str], members: Members, topics: Topics, subscribers: Mapping[str, list[str]]
) -> tuple[dict[str, list[TopicPartition]], list[TopicPartition]]:
    """The owned partitions that each member may keep, and the free partitions.

    A member keeps partitions that exist and that it still subscribes to. A partition that two
    members claim goes to the first one.
    """
    taken: set[TopicPartition] = set()
    kept: dict[str, list[TopicPartition]] = {}
    for member_id in order:
        view = members[member_id]
        mine = [
            (topic, partition)
            for topic, partition in sorted(set(view.owned))
            if topic in view.topics
            and 0 <= partition < topics.get(topic, 0)
            and (topic, partition) not in taken
        ]
        kept[member_id] = mine
        taken.update(mine)
    free = [
        (topic, partition)
        for topic in subscribers
        for partition in range(topics[topic])
        if (topic, partition) not in taken
    ]
    return kept, free


def _share_out(
    active: list[str], kept: dict[str, list[TopicPartition]], free: list[TopicPartition]
) -> None:
    """Balance members with equal subscriptions.

    Each member keeps partitions up to its share. Surplus and free partitions fill the members below
    their share.
    """
    if not active:
        return
    total = len(free) + sum(len(kept[member_id]) for member_id in active)
    least, larger_count = divmod(total, len(active))
    spare = list(free)
    for member_id in active:
        mine = kept[member_id]
        if len(mine) > least:
            quota = least + (larger_count > 0)
            larger_count -= quota > least
            spare.extend(mine[quota:])
            del mine[quota:]
    # Fill the least loaded member first, and the first in order among equals. The remainder gives
    # one more partition to some members.
    below = [
        (len(kept[one]), place, one) for place, one in enumerate(active) if len(kept[one]) < least
    ]
    heapq.heapify(below)
    rest = iter(sorted(spare))
    while below:
        load, place, member_id = below[0]
        kept[member_id].append(next(rest))
        if load + 1 < least:
            heapq.heapreplace(below, (load + 1, place, member_id))
        else:
            heapq.heappop(below)
    for one, member_id in zip(
        rest, (member_id for member_id in active if len(kept[member_id]) == least), strict=False
    ):
        kept[member_id].append(one)


class _Balance:
    """Balances members with unequal subscriptions.

    Each topic has a heap of its subscribers by load. A stale entry is corrected when it reaches the
    top. A member whose load fell is pushed once a pass into the heaps of all its topics.

    Passes end when nothing moves, or at STEPS_MAX, since all groups wait for this one. Along a
    chain of members, each of which shares a topic with the next, a pass moves a surplus by one
    member only. The group's next assignment continues from an uneven result.
    """

    def __init__(
        self,
        active: list[str],
        members: Members,
        kept: dict[str, list[TopicPartition]],
        subscribers: Mapping[str, list[str]],
    ) -> None:
        self._members = members
        self._out = kept
        self._kept = {member_id: dict.fromkeys(kept[member_id]) for member_id in active}
        self._place = {member_id: number for number, member_id in enumerate(active)}
        self._heaps = {
            topic: [(len(kept[one]), self._place[one], one) for one in having]
            for topic, having in subscribers.items()
        }
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._popularity = {topic: len(having) for topic, having in subscribers.items()}

    def _least_loaded(self, topic: str) -> tuple[int, str]:
        heap = self._heaps[topic]
        while True:
            load, place, member_id = heap[0]
            actual = len(self._kept[member_id])
            if load == actual:
                return load, member_id
            heapq.heapreplace(heap, (actual, place, member_id))

    def run(self, free: list[TopicPartition]) -> None:
        # Topics with the fewest subscribers first, since the others have more choice left.
        for one in sorted(free, key=lambda one: (self._popularity[one[0]], one)):
            self._kept[self._least_loaded(one[0])[1]][one] = None
        # Each move lowers the sum of the squared loads, so this terminates without the bound, too.
        steps = sum(map(len, self._kept.values())) + len(self._kept)
        for _ in range(max(1, STEPS_MAX // max(1, steps))):
            if not self._move_once():
                break
        for member_id, mine in self._kept.items():
            self._out[member_id] = list(mine)

    def _move_once(self) -> bool:
        """Make one pass over all members, the most loaded first. True when a partition moved."""
        has_moved = False
        for member_id in sorted(
            self._place, key=lambda one: (-len(self._kept[one]), self._place[one])
        ):
            mine = self._kept[member_id]
            before = len(mine)
            for one in sorted(mine):
                load, other = self._least_loaded(one[0])
                if load + 2 <= len(mine):
                    del mine[one]
                    self._kept[other][one] = None
            if len(mine) < before:
                has_moved = True
                for topic in self._members[member_id].topics:
                    if topic in self._heaps:
                        heapq.heappush(
                            self._heaps[topic], (len(mine), self._place[member_id], member_id)
                        )
        return has_moved


DEFAULT_ASSIGNOR = "sticky"
BUILT_IN: Mapping[str, Assignor] = {
    "range": range_assignor,
    "roundrobin": roundrobin_assignor,
    "sticky": sticky_assignor,
}
