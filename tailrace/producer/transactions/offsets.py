"""Offsets that go with the commit of a transaction.

Owner: pure.
Invariants: offsets of a member are sent with its member id and epoch, so that a rebalance fences
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tailrace.client.topics.offsets import topic_id_of
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import CommitFailedError, InvalidRequestError
from tailrace.core.records import ConsumerGroupMetadata
from tailrace.producer.transactions.state import GroupOffsets


def metadata_of(given: Any) -> ConsumerGroupMetadata:
    """The group of offsets, from what the program passed: the metadata of a consumer, or the name
    of a group whose partitions are assigned by hand. Raises InvalidRequestError,
    CommitFailedError.
    """
    if isinstance(given, str) and given:
        return ConsumerGroupMetadata(given, -1, "", None)
    if not isinstance(given, ConsumerGroupMetadata):
        raise InvalidRequestError(
            f"group_metadata is {given!r:.100}; give consumer.group_metadata() (of an "
            "AsyncConsumer: await it), or the name of the group"
        )
    if given.is_subscribed and given.generation_id < 0:
        raise CommitFailedError(
            f"the consumer is not a member of group {given.group_id!r:.100} now: its partitions "
            "may have gone to another one",
            ErrorCode.UNKNOWN_MEMBER,
        )
    return given


def groups_json(groups: Iterable[GroupOffsets]) -> list[dict[str, Any]]:
    """The offsets in END_TRANSACTION: fields and entries of COMMIT_OFFSETS version 2."""
    found: list[dict[str, Any]] = []
    for metadata, offsets in groups:
        member: dict[str, Any] = (
            {"member_id": metadata.member_id, "member_epoch": metadata.generation_id}
            if metadata.generation_id >= 0
            else {"member_id": None, "member_epoch": -1}
        )
        entries = [
            [
                str(key.topic), key.partition, int(one), one.leader_epoch, one.metadata,
                *([topic_id] if (topic_id := topic_id_of(key)) else []),
            ]
            for key, one in offsets.items()
        ]  # fmt: skip
        found.append({"group": metadata.group_id, **member, "entries": entries})
    return found
