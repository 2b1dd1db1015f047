"""Which member gets which partition: range, round robin and sticky, as pure functions.

An assignor is called with `members` {member id: MemberView} and `topics` {topic: partition count},
and returns {member id: [(topic, partition), ...]}.

- `range`: for each topic, neighbouring partitions to each of its subscribers; the first subscribers
  get one more where it does not come out even.
- `roundrobin`: partition by partition, each to the next of its topic's subscribers.
- `sticky`: balanced, and of what a member has it keeps as much as balance allows; what need not
  move does not move. Members whose subscriptions are equal get their shares by count at once; where
  they differ, the least loaded subscriber takes what is free, and then partitions move, one at a
  time, while that makes two loads more equal (after Kafka's AbstractStickyAssignor: KIP-54,
  KIP-429, KIP-341).

Owner: pure.
Invariants: every partition of a subscribed topic has one owner, a subscriber; with equal
    subscriptions loads differ by one at most (round robin, sticky; range: by topic); the same
    input, in whatever order its dictionaries are, gives the same output. Members are taken in the
    order of their instance ids, where they have them, then of their ids: a static member that comes
    back has its place.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

STEPS_MAX = 400_000
"""Partitions and members that balancing of unequal subscriptions looks at: a second or so."""
TopicPartition = tuple[str, int]
"""(topic name, partition)."""
Assignment = dict[str, list[TopicPartition]]
"""Member id -> partitions."""


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as an assignor sees it. `owned`: what it was to have until now."""

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
    """The members of each topic that has any, both in order."""
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
    """Neighbouring partitions to each subscriber, topic by topic."""
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
    """Partition by partition, each to the next subscriber in turn."""
    result: Assignment = {member_id: [] for member_id in members}
    order = _in_order(members)
    place = {member_id: number for number, member_id in enumerate(order)}
    rotation = 0
    for topic, subscribers in _subscribers(members, topics).items():
        # The first subscriber from the member on whose turn it is.
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
    """Balanced, and what need not move stays."""
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
    """What each member has that exists and that it still subscribes to, and what is left. A
    partition that two claim goes to the first.
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
    """Equal subscriptions: each member keeps up to its share; what is above the shares, and what is
    free, fills those that are below.
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
    # The least loaded first, and of equals the first in order; then one more to as many as it
    # takes.
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
    """Unequal subscriptions. Each topic has a heap of its subscribers by load. An entry whose load
    is another is put right when it comes to the top; a load that has become lower is entered anew
    in the heaps of all the member's topics, once for all that a pass takes from it.

    Passes end when nothing moves, or at STEPS_MAX: along a chain of members, each of which shares a
    topic with the next, a pass moves what is too much by one member only, and all groups wait for
    this one. What is left uneven then, the next change of the group goes on with.
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
        # Topics with the fewest subscribers first: the others can still choose.
        for one in sorted(free, key=lambda one: (self._popularity[one[0]], one)):
            self._kept[self._least_loaded(one[0])[1]][one] = None
        # Each move makes the sum of the squared loads smaller, so this would end by itself.
        steps = sum(map(len, self._kept.values())) + len(self._kept)
        for _ in range(max(1, STEPS_MAX // max(1, steps))):
            if not self._move_once():
                break
        for member_id, mine in self._kept.items():
            self._out[member_id] = list(mine)

    def _move_once(self) -> bool:
        """One pass over all members, the most loaded first; True when something moved."""
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
