"""Descriptions of consumer groups, their members, partitions and offsets, page by page.

Owner: the service; reads only.
Invariants:
- An answer has at most `answer_max` bytes.
- Each page except the last has the token of the next one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson

from appliance.groups.base.limits import GROUP_NAME_MAX, OFFSET_MAX, PARTITIONS_ASKED_MAX
from appliance.groups.base.members import REVOKING, Member, by_topic
from appliance.groups.base.messages import Partition, TopicImage, TopicView
from appliance.groups.base.offsets import OffsetBook
from appliance.groups.base.request_validation import place_in, shown
from appliance.groups.consumer.group import ConsumerGroup
from appliance.groups.consumer.prepared_offsets import PreparedOffsets
from appliance.groups.consumer.start_offsets import StartOffsets
from appliance.groups.store.group_store import GroupStore
from appliance.groups.store.schema import OffsetRow
from tailrace.core.errors import InvalidRequestError

FRAME_BYTES = 1_024
"""Bytes reserved for the parts of an answer beside its entries."""
NAMES_AT_ONCE = 500
LISTED_BYTES_MAX = 64 << 10
"""Limit of a page of LIST_GROUPS, since the process serves no other request meanwhile."""
DETAILS_SHARE = 4
"""Divisor: one member's topics and partitions take at most a fourth of an answer."""


class GroupDescriber:
    """Answers LIST_GROUPS, and DESCRIBE_GROUP and FETCH_OFFSETS of consumer groups."""

    def __init__(
        self, store: GroupStore, topics: TopicImage, offsets: OffsetBook,
        start_offsets: StartOffsets, answer_max: int,
        summary: Callable[[str], dict[str, Any] | None], waiting: PreparedOffsets,
    ) -> None:  # fmt: skip
        """`summary`: returns a group's row in LIST_GROUPS; None for a deleted group. `waiting`: the
        offsets of prepared transactions.
        """
        self._store = store
        self._topics = topics
        self._offsets = offsets
        self._start_offsets = start_offsets
        self._answer_max = answer_max
        self._summary = summary
        self._waiting = waiting

    def _page(
        self,
        head: dict[str, Any],
        name: str,
        entries: Iterable[tuple[Any, Any]],
        last: Any = None,
        *,
        bytes_max: int = OFFSET_MAX,
    ) -> bytes:
        """The answer: `head`, and under `name` as many values as fit. `entries`: (page token of the
        entry, value). `last`: token of a page without entries.
        """
        room = min(self._answer_max, bytes_max) - FRAME_BYTES - len(orjson.dumps(head))
        parts: list[bytes] = []
        following = last
        for token, value in entries:
            part = orjson.dumps(value)
            room -= len(part) + 1
            if room < 0 and parts:
                break
            parts.append(part)
            following = token
        else:
            following = None
        start = orjson.dumps(head)[:-1] + (b"," if head else b"")
        return b'%s"%s":[%s],"next":%s}' % (
            start,
            name.encode(),
            b",".join(parts),
            orjson.dumps(following),
        )

    # ---- groups ----------------------------------------------------------------------------------

    def list_groups(self, request: dict[str, Any]) -> bytes:
        """Answer LIST_GROUPS. Raises InvalidRequestError."""
        after = request.get("after") or ""
        if type(after) is not str or len(after) > GROUP_NAME_MAX:
            raise InvalidRequestError(
                f"after is {shown(after)}; it takes `next` of the page before: a group name"
            )
        return self._page({}, "groups", self._groups_behind(after), bytes_max=LISTED_BYTES_MAX)

    def _groups_behind(self, after: str) -> Iterator[tuple[str, Any]]:
        while names := self._store.group_names(after, NAMES_AT_ONCE):
            for name in names:
                summary = self._summary(name)
                if summary is not None:
                    yield name, summary
            after = names[-1]

    # ---- one group -------------------------------------------------------------------------------

    def describe(self, group: ConsumerGroup, request: dict[str, Any], now_ns: int) -> bytes:
        """Answer DESCRIBE_GROUP. Raises InvalidRequestError."""
        part = request.get("part") or "members"
        head = {
            "group": {
                **group.summary(), "rebalances": group.rebalances, "created_ms": group.created_ms,
                "empty_since_ms": group.empty_since_ms,
                "trouble": group.trouble,
            }
        }  # fmt: skip
        if part == "members":
            after = request.get("after") or ""
            if type(after) is not str:
                raise InvalidRequestError(
                    f"after is {shown(after)}; it takes `next` of the page before: a member id"
                )
            ids = sorted(one for one in group.members if one > after)
            return self._page(
                head,
                "members",
                ((one, self._member(group, group.members[one], now_ns)) for one in ids),
            )
        if part != "partitions":
            raise InvalidRequestError(f"part is {shown(part)}; it takes members or partitions")
        return self._page(head, "partitions", self._partitions(group, place_in(request)))

    def _member(self, group: ConsumerGroup, member: Member, now_ns: int) -> dict[str, Any]:
        settings = member.settings
        silent_ms = max(0, now_ns - member.last_heartbeat_ns) // 1_000_000
        described: dict[str, Any] = {
            "member_id": member.member_id, "instance_id": member.instance_id,
            "client_id": settings.client_id, "epoch": member.epoch,
            "state": "AWAY" if member.is_away else member.state, "topics": settings.topics,
            "owned": self._named((*member.assigned, *member.revoking)),
            "target": self._named(member.target), "last_heartbeat_ms_ago": silent_ms,
            "session_timeout_ms": settings.session_timeout_ms,
            "stuck": stuck(group, member, now_ns, self._topics),
        }  # fmt: skip
        most = self._answer_max // DETAILS_SHARE
        for name in ("target", "owned", "topics"):
            if len(orjson.dumps(described)) <= most:
                break
            described[name] = {} if name != "topics" else []
            described["is_shortened"] = True
        return described

    def _named(self, partitions: Iterable[Partition]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for topic_id, numbers in by_topic(partitions).items():
            topic = self._topics.by_id(topic_id)
            if topic is not None:
                found[topic.name] = numbers
        return found

    def _partitions(
        self, group: ConsumerGroup, after: tuple[str, int] | None
    ) -> Iterator[tuple[Any, Any]]:
        """All partitions of the subscribed topics, and the committed ones of other topics."""
        for topic in self._topics_of(group, after):
            behind = after[1] if after is not None and after[0] == topic.name else -1
            offsets = self._offsets.of_topic(group.group_id, topic.topic_id, behind)
            is_read = topic.name in group.signature and group.members
            for partition in (
                range(max(0, behind + 1), topic.partition_count) if is_read else offsets
            ):
                if partition < topic.partition_count:
                    yield (
                        [topic.name, partition],
                        self._partition(group, topic, partition, offsets.get(partition)),
                    )

    def _topics_of(self, group: ConsumerGroup, after: tuple[str, int] | None) -> list[TopicView]:
        found = {}
        for topic_id in self._offsets.topics_of(group.group_id):
            if (topic := self._topics.by_id(topic_id)) is not None:
                found[topic.name] = topic
        for name in group.signature if group.members else ():
            if (topic := self._topics.by_name(name)) is not None:
                found[name] = topic
        return [topic for name, topic in sorted(found.items()) if after is None or name >= after[0]]

    def _partition(
        self, group: ConsumerGroup, topic: TopicView, number: int, offset: OffsetRow | None
    ) -> dict[str, Any]:
        partition = topic.topic_id, number
        extent = self._topics.extent(*partition)
        beginning, end, high_watermark = (-1, -1, -1) if extent is None else extent
        committed, metadata, committed_ms = (
            (-1, "", -1)
            if offset is None
            else (offset.committed, offset.metadata, offset.committed_ms)
        )
        begins = self._start_offsets.of(group, topic, number) if offset is None else committed
        described: dict[str, Any] = {
            "topic": topic.name, "partition": number, "committed": committed,
            "beginning": beginning, "end": end,
            "lag": None if end < 0 or begins is None else max(0, end - max(begins, beginning)),
            "member_id": group.owners.get(partition),
            "metadata": metadata, "committed_ms": committed_ms,
        }  # fmt: skip
        if high_watermark != end:
            described["high_watermark"] = high_watermark
        if partition in group.blocked:
            described["waits_for"] = dict(self._hand_over(partition))
        return described

    def _hand_over(self, partition: Partition) -> list[tuple[str, int]]:
        """The source partitions of a blocked partition, with the offsets that the group has to
        commit in them first.
        """
        topic = self._topics.by_id(partition[0])
        return (
            []
            if topic is None
            else [
                (str(source), offset) for source, offset in topic.hand_overs.get(partition[1], ())
            ]
        )

    # ---- offsets ---------------------------------------------------------------------------------

    def fetch_offsets(self, group: ConsumerGroup | None, request: dict[str, Any]) -> bytes:
        """Answer FETCH_OFFSETS. An unknown group has no offsets. Raises InvalidRequestError, and
        ConcurrentTransactionsError for partitions of which a prepared transaction has an offset. A
        list of all offsets has what is committed now.
        """
        asked, after = request.get("partitions"), place_in(request)
        if asked is None:
            return self._page(
                {}, "offsets", () if group is None else self._all_offsets(group, after)
            )
        if (
            not isinstance(asked, list)
            or len(asked) > PARTITIONS_ASKED_MAX
            or not all(_is_partition(one) for one in asked)
        ):
            raise InvalidRequestError(
                f"partitions takes null (all) or a list of at most {PARTITIONS_ASKED_MAX} [topic, "
                "partition, topic id?]"
            )
        topic_ids = {(one[0], one[1]): one[2] if len(one) > 2 else None for one in asked}
        places = sorted(topic_ids)
        first = 0 if after is None else bisect_left(places, (after[0], after[1] + 1))
        requested = [(*place, topic_ids[place]) for place in places]
        return self._page({}, "offsets", self._offsets_of(group, requested[first:]))

    def _offsets_of(
        self, group: ConsumerGroup | None, requested: list[tuple[str, int, str | None]]
    ) -> Iterator[tuple[Any, Any]]:
        """The rows of the requested partitions. A request with a topic id gets the id of the topic
        at the end of the row; empty: there is no such topic. A topic of another name than asked for
        is none: rights were checked for the name.
        """
        for name, partition, topic_id in requested:
            topic = (
                self._topics.by_id(topic_id) if topic_id is not None else self._topics.by_name(name)
            )
            if topic is not None and topic.name != name:
                topic = None
            if group is not None and topic is not None:
                self._waiting.check(group.name, (topic.topic_id, partition))
            asked = [] if topic_id is None else [topic.topic_id if topic is not None else ""]
            row = (
                None
                if group is None or topic is None
                else self._offsets.get(group.group_id, topic.topic_id, partition)
            )
            begins = (
                None
                if row is not None or group is None or topic is None
                else self._start_offsets.of(group, topic, partition)
            )
            found = (
                _offset(name, partition, row)
                if begins is None
                else [name, partition, begins, -1, "", -1]
            )
            yield [name, partition], found + asked

    def _all_offsets(
        self, group: ConsumerGroup, after: tuple[str, int] | None
    ) -> Iterator[tuple[Any, Any]]:
        for topic in self._topics_of(group, after):
            behind = after[1] if after is not None and after[0] == topic.name else -1
            for partition, row in self._offsets.of_topic(
                group.group_id, topic.topic_id, behind
            ).items():
                if partition < topic.partition_count:
                    name = topic.name
                    yield [name, partition], _offset(name, partition, row)


def _is_partition(one: Any) -> bool:
    if not isinstance(one, list) or not 2 <= len(one) <= 3:
        return False
    is_place = type(one[0]) is str and type(one[1]) is int and -1 < one[1] < 1 << 31
    return is_place and (len(one) == 2 or one[2] is None or type(one[2]) is str)


def _offset(name: str, partition: int, row: OffsetRow | None) -> list[Any]:
    if row is None:
        return [name, partition, -1, -1, "", -1]
    return [name, partition, row.committed, row.leader_epoch, row.metadata, row.committed_ms]


def stuck(group: ConsumerGroup, member: Member, now_ns: int, topics: TopicImage) -> str:
    """The problem of a member and its consequence; empty: none."""
    settings = member.settings
    patience_ms = 2 * settings.heartbeat_interval_ms
    revoking_ms = (now_ns - member.revoking_since_ns) // 1_000_000
    if member.state == REVOKING and revoking_ms > patience_ms:
        names = group.names_of({topic_id for topic_id, _ in member.revoking}, topics)
        blocked = sorted(
            f"{names[topic_id]}-{partition}"
            for topic_id, partition in member.revoking
            if topic_id in names
        )
        shown_names = ", ".join(blocked[:3]) + (
            f" and {len(blocked) - 3} others" if len(blocked) > 3 else ""
        )
        left_s = max(0, settings.rebalance_timeout_ms - revoking_ms) // 1_000
        return (
            f"has not given back {shown_names or 'partitions of deleted topics'} for "
            f"{revoking_ms // 1_000} s: its program does not call poll; it is removed in {left_s} s"
        )
    silent_ms = (now_ns - member.last_heartbeat_ns) // 1_000_000
    if silent_ms > patience_ms:
        left_s = max(0, settings.session_timeout_ms - silent_ms) // 1_000
        return (
            f"{'is away' if member.is_away else 'has sent no heartbeat'} for "
            f"{silent_ms // 1_000} s: it is removed in {left_s} s"
        )
    return ""
