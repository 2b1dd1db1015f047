"""Administration of consumer groups: list, describe, offsets, delete. `tailrace.Admin` has these
methods.

Each call makes a request or a few, and joins their pages. A change is durable when the method
returns.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Call, Steps, operation
from tailrace.client.topics.list_offsets import At, list_offsets
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import InvalidRequestError, error_for, error_for_offset
from tailrace.core.records import OffsetAndMetadata
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import by_partition, name_list, name_of, partition_list, whole
from tailrace.protocol.frame import Api

T = TypeVar("T")
GROUP_OFFSETS_AT_ONCE = 1_024
GROUPS_AT_ONCE = 256
NO_OFFSET = UNKNOWN = -1


class GroupAdmin:
    """The methods of `Admin` for consumer groups."""

    _connection: Connection

    def _run_steps(self, steps: Steps[T], /) -> T:
        raise NotImplementedError

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        raise NotImplementedError

    @operation
    def list_groups(self) -> Steps[dict[str, dict[str, Any]]]:
        """All groups, names ascending: name -> a dict with `group`, `kind` ("consumer" or "share"),
        `state` (EMPTY, ASSIGNING, RECONCILING, STABLE or DEAD), `members` (their number),
        `assignor` and `epoch`.
        """
        return (yield from self._list_groups())

    def _list_groups(self) -> Steps[dict[str, dict[str, Any]]]:
        found: dict[str, dict[str, Any]] = {}
        after: str | None = ""
        while after is not None:
            answer = yield from self._call(Api.LIST_GROUPS, {"after": after})
            found.update((group["group"], group) for group in answer["groups"])
            after = answer.get("next")
        return found

    @operation
    def describe_groups(
        self,
        groups: str | Iterable[str] | None = None,
        *,
        members: bool = True,
        lag_seconds: bool = True,
    ) -> Steps[dict[str, dict[str, Any]]]:
        """All properties of groups (a name, or several; None: of all): name -> what `list_groups`
        returns for it, `rebalances` (their number), `created_ms`, `member_count`, `trouble` (an
        error of its assignor, else ""), `members` and `partitions`.

        `members` are dicts with

        - `member_id`, `instance_id`, `client_id`, `epoch`, `state`, `last_heartbeat_ms_ago`,
          `session_timeout_ms`
        - `topics`: its subscription
        - `owned`, `target`: its current and its assigned partitions, {topic: [partition, ...]}
        - `stuck`: a sentence if it holds others up, else ""

        `partitions` are dicts with

        - `topic`, `partition`, `metadata`, `committed_ms`, `beginning`, `end` (-1: unknown now)
        - `committed`: the next offset to read; -1: no commit
        - `lag`: the number of records after the committed offset. None without a commit, except for
          a partition that was added while the group existed
        - `lag_seconds`: the age of the first of these records; 0.0 without lag, None if unknown
        - `member_id`: its owner, or None
        - `waits_for`, of a partition that was added to hash slots and waits: {partition: the offset
          that the group is to commit there first}
        - `start_offset`, `in_flight`, `deliveries` and `at_delivery_limit`, of a share group. The
          last is the number of records whose delivery count limit is reached and that are not
          acknowledged. If it stays above 0, they cannot be written to the dead-letter topic.

        `lag_seconds=False` leaves those out, and saves reading a batch of each partition with lag.
        With `members=False` the list of members is empty. Raises UnknownGroupError.
        """
        self._connection.check_usable()
        names = (
            list((yield from self._list_groups()))
            if groups is None
            else name_list("groups", groups)
        )
        described: dict[str, dict[str, Any]] = {}
        for name in names:
            described[name] = yield from self._described(name, members)
        if lag_seconds:
            yield from add_lag_seconds(
                self._call,
                [row for group in described.values() for row in group["partitions"]],
                time.time_ns() // 1000,
            )
        return described

    def _described(self, name: str, with_members: bool) -> Steps[dict[str, Any]]:
        partitions, group = yield from self._described_part(name, "partitions")
        members, group = (
            (yield from self._described_part(name, "members")) if with_members else ([], group)
        )
        for row in partitions:
            for field in ("beginning", "end", "committed_ms"):
                row[field] = UNKNOWN if row.get(field) is None else row[field]
            row["member_id"] = row.get("member_id") or None
        return {
            **group,
            "trouble": group.get("trouble", ""),
            "member_count": group["members"],
            "members": members,
            "partitions": partitions,
        }

    def _described_part(
        self, name: str, part: str
    ) -> Steps[tuple[list[dict[str, Any]], dict[str, Any]]]:
        """(all rows of this part, the group)."""
        rows: list[dict[str, Any]] = []
        after: Any = None
        while True:
            answer = yield from self._call(
                Api.DESCRIBE_GROUP, {"group": name, "part": part, "after": after}
            )
            rows += answer[part]
            after = answer.get("next")
            if after is None:
                return rows, answer["group"]

    @operation
    def list_group_offsets(
        self, group: str, partitions: TopicPartition | Iterable[TopicPartition] | None = None
    ) -> Steps[dict[TopicPartition, OffsetAndMetadata | None]]:
        """A group's committed offsets: of these partitions, None without a commit, or (None) of all
        partitions with a commit. A group that does not exist has none.
        """
        self._connection.check_usable()
        requested = None if partitions is None else partition_list(partitions)
        request: dict[str, Any] = {"group": name_of("group", group), "partitions": None}
        if requested is None:
            return {
                key: found
                for key, found in (yield from self._offsets_pages(request))
                if found is not None
            }
        result: dict[TopicPartition, OffsetAndMetadata | None] = dict.fromkeys(requested)
        for start in range(0, len(requested), GROUP_OFFSETS_AT_ONCE):
            request["partitions"] = [
                list(key) for key in requested[start : start + GROUP_OFFSETS_AT_ONCE]
            ]
            result.update((yield from self._offsets_pages(request)))
        return result

    def _offsets_pages(
        self, request: dict[str, Any]
    ) -> Steps[list[tuple[TopicPartition, OffsetAndMetadata | None]]]:
        result = []
        after: Any = None
        while True:
            answer = yield from self._call(Api.FETCH_OFFSETS, {**request, "after": after})
            for topic, partition, offset, leader_epoch, metadata, committed_ms in answer["offsets"]:
                found = (
                    None
                    if NO_OFFSET in (offset, committed_ms)
                    else OffsetAndMetadata(offset, metadata, leader_epoch)
                )
                result.append((TopicPartition(topic, partition), found))
            after = answer.get("next")
            if after is None:
                return result

    @operation
    def alter_group_offsets(
        self, group: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata | None]
    ) -> Steps[None]:
        """Set the committed offsets of a group without members: partition -> offset (or an
        OffsetAndMetadata); None removes the commit, and auto_offset_reset decides. A group that
        does not exist is created. Raises the error of the first refused partition; the others are
        set: GroupNotEmptyError, UnknownTopicError, PartitionOutOfRangeError, OffsetOutOfRangeError,
        InvalidGroupError.
        """
        self._connection.check_usable()
        name_of("group", group)
        items = [
            [*key, *_offset_and_metadata(given)]
            for key, given in by_partition(
                "offsets", offsets, "{TopicPartition(topic, 0): 1000}"
            ).items()
        ]
        refused: list[list[Any]] = []
        for start in range(0, len(items), GROUP_OFFSETS_AT_ONCE):
            piece = items[start : start + GROUP_OFFSETS_AT_ONCE]
            refused += (
                yield from self._call(Api.ALTER_GROUP_OFFSETS, {"group": group, "offsets": piece})
            )["refused"]
        for topic, partition, code, sentence in refused:
            raise error_for_offset(code_of(code), sentence or f"{topic}-{partition}")

    @operation
    def delete_groups(self, groups: str | Iterable[str]) -> Steps[None]:
        """Delete groups (a name, or several) with their committed offsets. Raises the error of the
        first refused group; the others are deleted: UnknownGroupError, GroupNotEmptyError.
        """
        self._connection.check_usable()
        names = name_list("groups", groups)
        results: list[dict[str, Any]] = []
        for start in range(0, len(names), GROUPS_AT_ONCE):
            results += (
                yield from self._call(
                    Api.DELETE_GROUPS, {"groups": names[start : start + GROUPS_AT_ONCE]}
                )
            )["results"]
        for result in results:
            if result["code"] != ErrorCode.OK:
                raise error_for(code_of(result["code"]), result.get("message", ""))


def _offset_and_metadata(given: Any) -> tuple[int | None, str]:
    """(offset, metadata) for a request. Raises InvalidRequestError."""
    if given is None:
        return None, ""
    metadata = getattr(given, "metadata", "") or ""
    if not isinstance(metadata, str):
        raise InvalidRequestError(
            f'metadata is {metadata!r:.100}; it takes text, such as "batch 7"'
        )
    return whole("offset", getattr(given, "offset", given), 0), metadata


def first_unread(row: Mapping[str, Any]) -> int:
    """The offset at which a group goes on in a partition, from a row of `describe_groups`;
    NO_OFFSET: no commit.
    """
    found = row.get("start_offset")
    return int(row.get("committed", NO_OFFSET) if found is None else found)


def add_lag_seconds(call: Call, rows: list[dict[str, Any]], now_us: int) -> Steps[None]:
    """Set `lag_seconds` in rows of `describe_groups`: the age of the first unread record. Only
    partitions with lag are looked up.
    """
    requested: dict[TopicPartition, dict[int, At]] = {}
    for row in rows:
        row["lag_seconds"] = 0.0 if row["lag"] == 0 else None
        if row["lag"] and first_unread(row) != NO_OFFSET:
            offset = first_unread(row)
            requested.setdefault(TopicPartition(row["topic"], row["partition"]), {})[offset] = {
                "time_of": offset
            }
    times: dict[tuple[TopicPartition, int], int] = {}
    while requested:  # one offset of each partition at a time: groups may differ in it
        offset_of = {key: offsets.popitem() for key, offsets in requested.items()}
        requested = {key: offsets for key, offsets in requested.items() if offsets}
        for key, item in (
            yield from list_offsets(call, [(key, at) for key, (_, at) in offset_of.items()])
        ).items():
            if item["code"] == ErrorCode.OK and item["offset"] >= 0:
                times[key, offset_of[key][0]] = item.get("timestamp_us", -1)
    for row in rows if times else ():
        made_us = (
            times.get((TopicPartition(row["topic"], row["partition"]), first_unread(row)))
            if row["lag"]
            else None
        )
        if made_us is not None and made_us >= 0:
            row["lag_seconds"] = max(0.0, (now_us - made_us) / 1e6)
