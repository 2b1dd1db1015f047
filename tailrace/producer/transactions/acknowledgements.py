"""Acknowledgements of share consumers that go with the commit of a transaction.

Owner: pure.
Invariants: an acknowledgement names its member and epoch, so that a commit is refused when the
    records have gone to another member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tailrace.core.errors import InvalidRequestError
from tailrace.core.records import Record
from tailrace.protocol.json_messages import SHARE_RUNS_MAX

if TYPE_CHECKING:
    from tailrace.client.records.attached_records import AttachedMember, AttachedRecords

_ALLOWED = ("accept", "release")


def attach_of(share_consumer: Any) -> Callable[[Iterable[Record], str], AttachedRecords]:
    """The share consumer's method that attaches records. Raises InvalidRequestError."""
    attach: Callable[[Iterable[Record], str], AttachedRecords] | None = getattr(
        share_consumer, "_attach", None
    )
    if attach is None:
        raise InvalidRequestError(
            f"{share_consumer!r:.100} is no share consumer; pass the ShareConsumer whose poll() "
            "returned the records. Offsets of a Consumer go with send_offsets_to_transaction()"
        )
    return attach


def outcome_of(given: Any) -> str:
    """The outcome as requests name it. Raises InvalidRequestError."""
    word = getattr(given, "value", given)
    if word == "reject":
        raise InvalidRequestError(
            "a transaction cannot reject a record, since its dead letter is written outside of it: "
            "send the record to its dead-letter topic in the transaction, and accept it"
        )
    if word not in _ALLOWED:
        raise InvalidRequestError(
            f"outcome is {given!r:.100}; in a transaction it takes {' or '.join(_ALLOWED)}"
        )
    return str(word)


def records_of(given: Any) -> list[Record]:
    """The records of one, or of many. Raises InvalidRequestError."""
    if isinstance(given, Record):
        return [given]
    found = list(given) if isinstance(given, Iterable) else [given]
    if all(isinstance(one, Record) for one in found):
        return found
    raise InvalidRequestError(f"records is {given!r:.100}; pass a record or a list of records")


def members_json(attached: Iterable[AttachedRecords]) -> list[dict[str, Any]]:
    """The acknowledgements in END_TRANSACTION: fields of SHARE_ACKNOWLEDGE, by member."""
    rows: dict[AttachedMember, list[tuple[str, int, int, str]]] = {}
    for one in attached:
        rows.setdefault(one.member, []).extend((*row, one.outcome) for row in one.rows)
    return [
        {
            "group": member.group,
            "member_id": member.member_id,
            "member_epoch": member.epoch,
            "acknowledge": _runs(sorted(found)),
        }
        for member, found in rows.items()
    ]


def check_size(attached: Iterable[AttachedRecords]) -> None:
    """Raise InvalidRequestError if one commit cannot carry these acknowledgements."""
    if any(len(one["acknowledge"]) > SHARE_RUNS_MAX for one in members_json(attached)):
        raise InvalidRequestError(
            f"a transaction acknowledges at most {SHARE_RUNS_MAX} runs of offsets of a consumer: "
            "commit more often"
        )


def _runs(rows: list[tuple[str, int, int, str]]) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for topic_id, partition, offset, outcome in rows:
        last = runs[-1] if runs else None
        if last is not None and last[:2] + last[3:] == [topic_id, partition, offset - 1, outcome]:
            last[3] = offset
        else:
            runs.append([topic_id, partition, offset, offset, outcome])
    return runs
