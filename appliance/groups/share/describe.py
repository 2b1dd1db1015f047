"""Descriptions of a share group for operators, page by page, and changes of its start offsets.

Owner: none; functions over a group, which only `alter` changes.
Invariants: a page takes at most half of an answer's limit. `next` is the token of the next page,
    None on the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from appliance.groups.base.limits import OFFSET_MAX, PARTITIONS_ASKED_MAX
from appliance.groups.base.messages import Partition, TopicImage
from appliance.groups.base.request_validation import entries_in
from appliance.groups.share.group.members import ShareMember
from appliance.groups.share.group.share_group import ShareGroup
from appliance.groups.share.partition.offset_ranges import Kind
from appliance.groups.share.partition.share_partition import SharePartition
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError
from tailrace.protocol.json_messages import encode_json

TOPICS_SHOWN = 50


def summary(group: ShareGroup) -> dict[str, Any]:
    """The group's row in LIST_GROUPS."""
    state = "STABLE" if group.members else "EMPTY"
    return {
        "group": group.name,
        "kind": "share",
        "state": state,
        "members": len(group.members),
        "assignor": "",
        "epoch": group.epoch,
    }


def describe(
    group: ShareGroup, topics: TopicImage, request: dict[str, Any], answer_max: int, now_ns: int
) -> dict[str, Any]:
    """Answer DESCRIBE_GROUP with a page of members or partitions. Raises InvalidRequestError."""
    part, after = request.get("part", "members"), request.get("after")
    answer: dict[str, Any] = {
        "group": {**summary(group), "rebalances": 0, "created_ms": group.created_ms}
    }
    rows: Iterator[tuple[Any, Any]]
    if part == "members":
        if after is not None and not isinstance(after, str):
            raise InvalidRequestError(
                f"after is {after!r:.100}; it takes `next` of the page before, or null"
            )
        rows = (
            (member_id, _member(group.members[member_id], now_ns))
            for member_id in sorted(group.members)
            if after is None or member_id > after
        )
    elif part == "partitions":
        start = _position(after)
        rows = (
            (place, _partition(group, topics, place, key))
            for place, key in _in_order(group, topics)
            if place > start
        )
    else:
        raise InvalidRequestError(f"part is {part!r:.100}; allowed are members and partitions")
    answer[part], answer["next"] = _page(rows, answer_max // 2)
    return answer


def _member(member: ShareMember, now_ns: int) -> dict[str, Any]:
    return {
        "member_id": member.member_id, "instance_id": None, "client_id": member.client_id,
        "epoch": member.epoch, "state": "STABLE",
        "topics": list(member.topics[:TOPICS_SHOWN]), "owned": {}, "target": {},
        "last_heartbeat_ms_ago": (now_ns - member.last_request_ns) // 1_000_000,
        "session_timeout_ms": member.session_timeout_ms, "stuck": "",
    }  # fmt: skip


def _partition(
    group: ShareGroup, topics: TopicImage, place: tuple[str, int], key: Partition
) -> dict[str, Any]:
    topic, partition, rules = topics.by_name(place[0]), group.partitions[key], group.rules(key[0])
    assert topic is not None
    extent = topics.extent(topic.topic_id, place[1])
    beginning, end, high_watermark = (None, None, None) if extent is None else extent
    in_flight = partition.spans.in_flight_count
    described = {
        "topic": place[0], "partition": place[1], "committed": partition.start_offset,
        "beginning": beginning, "end": end,
        "lag": None if end is None else _lag(partition, beginning or 0, end), "member_id": "",
        "metadata": "", "committed_ms": 0,
        "start_offset": partition.start_offset, "next_offset": partition.next_offset,
        "in_flight": in_flight,
        "acquired": partition.spans.acquired_count,
        "deliveries": max((span.state.delivery_count for span in partition.spans), default=0),
        "at_delivery_limit": 0 if rules is None else _at_limit(partition, rules.delivery_limit),
    }  # fmt: skip
    if high_watermark != end:
        described["high_watermark"] = high_watermark
    return described


def _at_limit(partition: SharePartition, delivery_limit: int) -> int:
    """Number of in-flight records at the delivery limit. The count stays high when they cannot be
    written to the dead-letter topic.
    """
    waits = (Kind.AVAILABLE, Kind.ACQUIRED)
    return sum(
        span.size
        for span in partition.spans
        if span.state.kind in waits and span.state.delivery_count >= delivery_limit
    )


def _lag(partition: SharePartition, beginning: int, end: int) -> int:
    """Number of records in the log that are not done. Records that retention has removed do not
    count, even before the group has noticed.
    """
    spans = partition.spans
    in_flight = spans.in_flight_count
    if beginning > spans.start:
        waits = (Kind.AVAILABLE, Kind.ACQUIRED)
        in_flight = sum(
            span.size
            for span in spans.between(beginning, spans.next - 1)
            if span.state.kind in waits
        )
    return max(0, end - max(beginning, spans.next)) + in_flight


def _in_order(group: ShareGroup, topics: TopicImage) -> list[tuple[tuple[str, int], Partition]]:
    """((topic, partition), key) of the group's partitions of existing topics, in order."""
    named = [
        (topic.name, key) for key in group.partitions if (topic := topics.by_id(key[0])) is not None
    ]
    return sorted(((name, key[1]), key) for name, key in named)


def _position(after: Any) -> tuple[str, int]:
    if after is None:
        return "", -1
    if (
        isinstance(after, list)
        and len(after) == 2
        and isinstance(after[0], str)
        and isinstance(after[1], int)
    ):
        return after[0], after[1]
    raise InvalidRequestError(
        f"{after!r:.100} is not a place; write [topic, partition], as `next` of the page before"
    )


def _page(rows: Iterator[tuple[Any, Any]], bytes_max: int) -> tuple[list[Any], Any]:
    """The rows of a page, with the place of the last one if there are more."""
    page: list[Any] = []
    size, last = 0, None
    for place, row in rows:
        size += len(encode_json(row)) + 1
        if page and size > bytes_max:
            return page, last
        page.append(row)
        last = place
    return page, None


def start_offsets(
    group: ShareGroup, topics: TopicImage, request: dict[str, Any], answer_max: int
) -> dict[str, Any]:
    """Answer FETCH_OFFSETS with the share-partition start offsets, below which every record is
    done. Raises InvalidRequestError.
    """
    requested, start = request.get("partitions"), _position(request.get("after"))
    places = dict(_in_order(group, topics))
    if requested is not None:
        if not isinstance(requested, list) or len(requested) > PARTITIONS_ASKED_MAX:
            raise InvalidRequestError(
                f"partitions takes a list of at most {PARTITIONS_ASKED_MAX} [topic, partition], "
                "or null for all"
            )
        asked = sorted({_position(item) for item in requested})
    else:
        asked = list(places)
    rows = (
        (place, [*place, _start(group, places.get(place)), -1, "", 0])
        for place in asked
        if place > start
    )
    page, following = _page(rows, answer_max // 2)
    return {"offsets": page, "next": following}


def _start(group: ShareGroup, key: Partition | None) -> int:
    return -1 if key is None else group.partitions[key].start_offset


def alter(
    group: ShareGroup, topics: TopicImage, request: dict[str, Any], answer_max: int
) -> list[list[Any]]:
    """Apply ALTER_GROUP_OFFSETS to a group without members. Returns the refused entries. Raises
    InvalidRequestError before any change.
    """
    given = entries_in(request)
    if not all(isinstance(item, list) and len(item) in (3, 4) for item in given):
        raise InvalidRequestError(
            "offsets takes a list of [topic, partition, offset or null, metadata]"
        )
    entries = [(_position(item[:2]), item[2]) for item in given]
    if not all(
        offset is None or (isinstance(offset, int) and not isinstance(offset, bool))
        for _, offset in entries
    ):
        raise InvalidRequestError("an offset is a whole number, or null to forget the partition")
    refused: list[list[Any]] = []
    changes: list[tuple[Partition, int | None]] = []
    for (name, number), offset in entries:
        topic = topics.by_name(name)
        if topic is None or not 0 <= number < topic.partition_count:
            refused.append(
                [name, number, int(ErrorCode.UNKNOWN_TOPIC), "there is no such topic or partition"]
            )
            continue
        key = topic.topic_id, number
        end = topics.high_watermark(*key)
        if offset is not None and not 0 <= offset <= (OFFSET_MAX if end is None else end):
            refused.append(
                [name, number, int(ErrorCode.OFFSET_OUT_OF_RANGE), f"the log ends at {end}"]
            )
        else:
            changes.append((key, offset))
    if len(encode_json(refused)) > answer_max // 2:
        raise InvalidRequestError(
            f"{len(refused)} of {len(entries)} offsets are refused, too many to list: send "
            "fewer in one request"
        )
    for key, offset in changes:
        if offset is None:
            group.forget_partition(key)
        else:
            group.put_partition(key, SharePartition.starting_at(offset))
    return refused
