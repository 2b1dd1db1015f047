"""Validation of requests about delayed records: each field is checked once, before anything is
done.

Owner: pure, called by the scheduler.

Invariants: results have the declared types, and numbers that fit 62 bits, as numpy and struct need.
Anything else is refused with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tailrace.core.errors import InvalidRequestError
from tailrace.core.schedule.delays import HORIZON_US, TICK_US, DelayKey, parse_delay_id
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS
from workers.delays.changing_transaction import ChangingTransaction

LIST_LIMIT = 1_000
CHANGE_LIMIT = 2_000
DESCRIBE_LIMIT = 1_000
KEY_MAX = 4_096
"""Largest key in a list request, in bytes. `listing` shows no longer ones."""
TOPIC_MAX = 255
NUMBER_MAX = 1 << 62
NEVER_TICK = NUMBER_MAX // TICK_US


@dataclass(frozen=True, slots=True)
class ListRequest:
    """Request for a page of a topic's pending rows, from (partition, tick, offset) on."""

    topic: str
    partition: int | None
    limit: int
    key: bytes | None
    begin_tick: int
    end_tick: int
    after: tuple[int, int, int] | None

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> ListRequest:
        """Raises InvalidRequestError."""
        after = request.get("after")
        if after is not None:
            if (
                not isinstance(after, list)
                or len(after) != 3
                or not all(is_number(part) and part >= 0 for part in after)
            ):
                raise InvalidRequestError(
                    f"after is {shown(after)}; it takes the three numbers of the last page's end"
                )
            after = after[0], after[1], after[2]
        topic, partition = topic_in(request, is_needed=True), number_in(request, "partition", 0)
        begin, end = (number_in(request, name, -NUMBER_MAX) for name in ("from_us", "to_us"))
        return cls(
            str(topic), partition, limit_in(request, LIST_LIMIT, 100), _key_in(request),
            0 if begin is None else max(0, -(-begin // TICK_US)),
            NEVER_TICK if end is None else max(0, -(-end // TICK_US)), after,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DescribeRequest:
    """Request for a page of the partitions with delays, after (topic, partition)."""

    limit: int
    after: tuple[str, int] | None

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> DescribeRequest:
        """Raises InvalidRequestError."""
        after = request.get("after")
        if after is not None:
            if (
                not isinstance(after, list)
                or len(after) != 2
                or not isinstance(after[0], str)
                or not is_number(after[1])
            ):
                raise InvalidRequestError(
                    f"after is {shown(after)}; it takes topic and partition of the last page's end"
                )
            after = after[0], after[1]
        return cls(limit_in(request, DESCRIBE_LIMIT, DESCRIBE_LIMIT), after)


@dataclass(frozen=True, slots=True)
class ChangeItem:
    """A delayed record to cancel (`due_us` is None) or reschedule."""

    number: int
    """Index in the request."""
    key: DelayKey
    due_us: int | None
    owner: int | None
    """The only user whose record may be changed. None: every record may."""

    @classmethod
    def of(cls, number: int, item: object, wall_us: int) -> ChangeItem:
        """Raises InvalidRequestError."""
        if not isinstance(item, dict):
            raise InvalidRequestError("each entry of `changes` must be an object")
        key = parse_delay_id(item.get("delay_id"))
        due_us = item.get("due_us")
        if due_us is not None and not (is_number(due_us) and 0 <= due_us <= wall_us + HORIZON_US):
            raise InvalidRequestError(
                f"due_us is {shown(due_us)}; it takes microseconds since 1970, at most 20 years "
                "ahead"
            )
        if not 0 <= key.offset <= NUMBER_MAX or not 0 <= key.due_us <= NUMBER_MAX:
            raise InvalidRequestError("the delay_id has an impossible offset or time")
        owner = item.get("owner")
        if owner is not None and not (is_number(owner) and owner > 0):
            raise InvalidRequestError(f"owner is {shown(owner)}; it takes the number of a user")
        return cls(number, key, due_us, owner)


def transaction_in(request: Mapping[str, Any]) -> ChangingTransaction | None:
    """Return the transaction that a change belongs to. Raises InvalidRequestError."""
    found = request.get("transaction")
    if found is None:
        return None
    names = ("producer_id", "producer_epoch", "number")
    limits = ((TRANSACTIONAL_PRODUCER_IDS, 1 << 63), (0, 1 << 15), (1, NUMBER_MAX))
    given = [found.get(name) for name in names] if isinstance(found, dict) else []
    values = [
        value
        for value, (low, high) in zip(given, limits, strict=False)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value < high
    ]
    if len(values) != len(names):
        raise InvalidRequestError(
            f"transaction is {shown(found)}; it takes producer_id, producer_epoch of an open "
            "transaction, and the number of the change within it, from 1 on"
        )
    producer_id, epoch, number = values
    return ChangingTransaction((producer_id, epoch), number)


def changes_in(request: Mapping[str, Any]) -> list[Any]:
    """Raises InvalidRequestError."""
    items = request.get("changes")
    if not isinstance(items, list) or not 1 <= len(items) <= CHANGE_LIMIT:
        raise InvalidRequestError(
            f"the request needs a list `changes` of 1 to {CHANGE_LIMIT} entries"
        )
    return items


def is_number(value: object) -> bool:
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and -NUMBER_MAX <= value <= NUMBER_MAX
    )


def number_in(request: Mapping[str, Any], name: str, least: int) -> int | None:
    """Raises InvalidRequestError."""
    value = request.get(name)
    if value is not None and not (is_number(value) and value >= least):
        raise InvalidRequestError(f"{name} is {shown(value)}; it takes a whole number")
    return value


def limit_in(request: Mapping[str, Any], most: int, usual: int) -> int:
    """Raises InvalidRequestError."""
    value = request.get("limit", usual)
    if not is_number(value) or not 1 <= value <= most:
        raise InvalidRequestError(f"limit is {shown(value)}; it takes 1 to {most}")
    return int(value)


def topic_in(request: Mapping[str, Any], *, is_needed: bool) -> str | None:
    """Raises InvalidRequestError."""
    value = request.get("topic")
    if (value is None and not is_needed) or (isinstance(value, str) and len(value) <= TOPIC_MAX):
        return value
    raise InvalidRequestError(f"topic is {shown(value)}; it takes a topic's name")


def _key_in(request: Mapping[str, Any]) -> bytes | None:
    value = request.get("key")
    try:
        if value is None or (isinstance(value, str) and len(value) <= 2 * KEY_MAX):
            return None if value is None else bytes.fromhex(value)
    except ValueError:
        pass  # refused below
    raise InvalidRequestError(
        f"key is {shown(value)}; it takes hexadecimal digits, of at most {KEY_MAX} bytes"
    )


def shown(value: object) -> str:
    """Return a value as shown in an error message."""
    text = (
        repr(value)
        if isinstance(value, (str, int, float, bool, type(None)))
        else f"a {type(value).__name__}"
    )
    return text if len(text) <= 80 else f"{text[:77]}..."
