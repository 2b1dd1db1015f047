"""Delivered records that are not acknowledged yet, and acknowledgements that are not sent yet.

    delivered --acknowledge()----------> acknowledged --acknowledged()--> sent --response--> removed
       |  '-----accept_remaining()----------^  ^                 '-- renew --.
       '--retain_remaining()--> retained ------'  <--------------------------'

A retained record is acknowledged by the program only. A record is retained when other records of
its poll were acknowledged, when it was renewed, or when a loop that delivered it ended early.

Owner: one ShareConsumer, one thread.

Invariants:
- An offset is kept from its delivery until its acknowledgement is sent, or until its lock expires
  without one (`drop_expired`).
- An acknowledgement that was sent and certainly not applied is put back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from tailrace.client.connections.runtime import NEVER_NS
from tailrace.core.errors import InvalidRequestError
from tailrace.core.topic_partition import TopicPartition
from tailrace.share.outcomes import OUTCOMES

REJECTING = "rejecting"
"""Rejected, and not in the dead-letter topic yet: not to be sent."""
RETAINED = "retained"
"""Not acknowledged, and excluded from implicit acknowledgement."""
IN_LOOP = "in a loop"
"""Not acknowledged, and delivered last by a loop."""
IN_TRANSACTION = "in a transaction"
"""Its acknowledgement goes with the commit of a transaction."""
RENEW_IN_TRANSACTION = "renew in a transaction"
"""The same, and its lock is to be renewed."""
UNREAD = "unread"
"""Never delivered: its acquisition does not count as a delivery."""
_ATTACHED = frozenset({IN_TRANSACTION, RENEW_IN_TRANSACTION})
_SENT = frozenset(OUTCOMES) | {UNREAD, RENEW_IN_TRANSACTION}
_SILENT = frozenset({None, RETAINED, IN_LOOP})
_DROPPED = _SILENT | {IN_TRANSACTION}
_ATTACHABLE = _SILENT | {"release", "renew"}
RENEWALS = frozenset({"renew", RENEW_IN_TRANSACTION})


class Acknowledgement(NamedTuple):
    """The outcome of the offsets `first` to `last`."""

    key: TopicPartition
    first: int
    last: int
    outcome: str


class Acknowledgements:
    """The delivered records of one share consumer with their outcomes and locks."""

    def __init__(self) -> None:
        self._outcomes: dict[TopicPartition, dict[int, str | None]] = {}
        """The outcome of each delivered offset; None: not acknowledged."""
        self._locks: dict[TopicPartition, deque[tuple[int, int, int]]] = {}
        """(expiry, first offset, last offset), in order of expiry."""
        self._renewed: dict[tuple[TopicPartition, int], int] = {}
        """The expiry of each renewed lock."""
        self._may_have_acknowledged = False

    def __bool__(self) -> bool:
        return any(self._outcomes.values())

    def add(
        self,
        key: TopicPartition,
        first: int,
        last: int,
        outcome: str | None = None,
        locked_until_ns: int = NEVER_NS,
    ) -> None:
        """Add the offsets `first` to `last`, with an outcome that is known already, if any."""
        self._outcomes.setdefault(key, {}).update(dict.fromkeys(range(first, last + 1), outcome))
        self._may_have_acknowledged = self._may_have_acknowledged or outcome in _SENT
        if locked_until_ns != NEVER_NS:
            self._locks.setdefault(key, deque()).append((locked_until_ns, first, last))

    def renewed(self, key: TopicPartition, first: int, last: int, locked_until_ns: int) -> None:
        """Extend the locks of these offsets."""
        self._renewed.update(
            dict.fromkeys(((key, offset) for offset in range(first, last + 1)), locked_until_ns)
        )
        self._locks.setdefault(key, deque()).append((locked_until_ns, first, last))

    def drop_expired(self, now_ns: int) -> int:
        """Forget the records whose locks expired without an acknowledgement; they are delivered
        again. Returns how many.
        """
        count = 0
        for key in [key for key, locks in self._locks.items() if locks[0][0] <= now_ns]:
            locks, outcomes = self._locks[key], self._outcomes.get(key, {})
            while locks and locks[0][0] <= now_ns:
                _, first, last = locks.popleft()
                for offset in range(first, last + 1):
                    if (
                        outcomes.get(offset, UNREAD) in _DROPPED
                        and self._renewed.get((key, offset), 0) <= now_ns
                    ):
                        del outcomes[offset]
                        count += 1
                    if self._renewed.get((key, offset), NEVER_NS) <= now_ns:
                        del self._renewed[key, offset]
            if not locks:
                del self._locks[key]
            if not outcomes:
                self._outcomes.pop(key, None)
        return count

    def acknowledge(self, topic: str, partition: int, offset: int, outcome: str) -> None:
        """Set a record's outcome. Raises InvalidRequestError for a record that is not kept here."""
        outcomes = self._outcomes.get((topic, partition))  # type: ignore[call-overload]  # a plain tuple is cheaper to make
        if outcomes is None or outcomes.get(offset, UNREAD) is UNREAD:
            raise InvalidRequestError(
                f"offset {offset} of {topic}-{partition} is not this consumer's to acknowledge: "
                "it was not delivered here, was acknowledged before, or its lock has expired. "
                "Acknowledge each record of poll() once, before its lock expires"
            )
        if outcomes[offset] in _ATTACHED:
            if outcome != "renew":
                raise InvalidRequestError(
                    f"offset {offset} of {topic}-{partition} is acknowledged with a transaction, "
                    "and can only be renewed: commit or abort the transaction"
                )
            outcome = RENEW_IN_TRANSACTION
        outcomes[offset] = outcome
        self._may_have_acknowledged = True

    def check_attachable(self, topic: str, partition: int, offset: int) -> None:
        """Raise InvalidRequestError unless a transaction may acknowledge the record."""
        outcome = self._outcomes.get(TopicPartition(topic, partition), {}).get(offset, UNREAD)
        if outcome in _ATTACHABLE:
            return
        why = (
            "it is in a transaction already"
            if outcome in _ATTACHED
            else "it was not delivered here, was acknowledged before, or its lock has expired"
        )
        raise InvalidRequestError(
            f"offset {offset} of {topic}-{partition} cannot be acknowledged with a transaction: "
            f"{why}. Pass each record of poll() once, before its lock expires"
        )

    def attach(self, places: Iterable[tuple[str, int, int]]) -> None:
        """Leave the acknowledgement of these records to a transaction."""
        for topic, partition, offset in places:
            self._outcomes[TopicPartition(topic, partition)][offset] = IN_TRANSACTION

    def detach(self, places: Iterable[tuple[str, int, int]], *, is_committed: bool) -> None:
        """The transaction of these records has ended: it has acknowledged them, or they are
        released. A repeated call changes nothing.
        """
        for topic, partition, offset in places:
            outcomes = self._outcomes.get(TopicPartition(topic, partition), {})
            if outcomes.get(offset) in _ATTACHED:
                if is_committed:
                    del outcomes[offset]
                else:
                    outcomes[offset] = "release"
                    self._may_have_acknowledged = True

    def outcome_of(self, topic: str, partition: int, offset: int) -> str | None:
        """A record's outcome; None: not acknowledged, or not kept here."""
        return self._outcomes.get(TopicPartition(topic, partition), {}).get(offset)

    def has(self, topic: str, partition: int, offset: int) -> bool:
        """True if the record is kept here."""
        return (
            self._outcomes.get(TopicPartition(topic, partition), {}).get(offset, UNREAD)
            is not UNREAD
        )

    def accept_one(self, topic: str, partition: int, offset: int) -> None:
        """Accept a record that is kept here and not acknowledged."""
        outcomes = self._outcomes.get(TopicPartition(topic, partition), {})
        if outcomes.get(offset, RETAINED) in (None, IN_LOOP):
            outcomes[offset] = "accept"
            self._may_have_acknowledged = True

    def retain_one(self, topic: str, partition: int, offset: int) -> None:
        """Retain a record that a loop delivered last."""
        outcomes = self._outcomes.get(TopicPartition(topic, partition), {})
        if outcomes.get(offset) is IN_LOOP:
            outcomes[offset] = RETAINED

    @property
    def has_acknowledged(self) -> bool:
        """True if there is an acknowledgement to send."""
        if self._may_have_acknowledged:
            self._may_have_acknowledged = any(
                outcome in _SENT
                for outcomes in self._outcomes.values()
                for outcome in outcomes.values()
            )
        return self._may_have_acknowledged

    def accept_remaining(self) -> None:
        """Accept all records that are neither acknowledged nor retained."""
        self._acknowledge_remaining("accept")

    def leave_loop(self, topic: str, partition: int, offset: int) -> None:
        """Treat a record that a loop delivered last as one that a poll delivered."""
        outcomes = self._outcomes.get(TopicPartition(topic, partition), {})
        if outcomes.get(offset) is IN_LOOP:
            outcomes[offset] = None

    def accept_in_loops(self) -> None:
        """Accept the records that loops delivered last."""
        for outcomes in self._outcomes.values():
            for offset, outcome in outcomes.items():
                if outcome is IN_LOOP:
                    outcomes[offset] = "accept"
                    self._may_have_acknowledged = True

    def retain_remaining(self) -> None:
        """Retain all records that are not acknowledged."""
        self._acknowledge_remaining(RETAINED)

    def _acknowledge_remaining(self, new_outcome: str) -> None:
        for outcomes in self._outcomes.values():
            for offset, outcome in outcomes.items():
                if outcome is None:
                    outcomes[offset] = new_outcome
                    self._may_have_acknowledged = True

    def acknowledged(self, runs_max: int) -> list[Acknowledgement]:
        """The acknowledgements to send, at most `runs_max` ranges. They stay here until `sent`."""
        runs: list[Acknowledgement] = []
        for key, outcomes in self._outcomes.items():
            acknowledged = sorted(
                offset for offset, outcome in outcomes.items() if outcome in _SENT
            )
            _add_runs(runs, key, acknowledged, outcomes, runs_max)
            if len(runs) >= runs_max:
                break
        return runs

    def sent(self, runs: list[Acknowledgement]) -> None:
        """Remove acknowledgements that a request carries. A repeated call changes nothing, unless a
        record was acknowledged again in between.
        """
        for key, first, last, outcome in runs:
            outcomes = self._outcomes.get(key, {})
            for offset in range(first, last + 1):
                if outcomes.get(offset) == outcome:
                    if outcome == "renew":
                        outcomes[offset] = RETAINED
                    elif outcome == RENEW_IN_TRANSACTION:
                        outcomes[offset] = IN_TRANSACTION
                    else:
                        del outcomes[offset]

    def put_back(self, runs: list[Acknowledgement]) -> None:
        """Restore acknowledgements that were not sent or not applied. A newer outcome of a renewed
        record is kept.
        """
        for key, first, last, outcome in runs:
            outcomes = self._outcomes.setdefault(key, {})
            before = {IN_TRANSACTION} if outcome == RENEW_IN_TRANSACTION else _SILENT
            for offset in range(first, last + 1):
                if outcomes.get(offset, RETAINED) in before:
                    outcomes[offset] = outcome
        self._may_have_acknowledged = True

    def clear(self, topic: str | None = None) -> tuple[int, list[Acknowledgement]]:
        """Forget all records, or those of one topic: their locks are lost. Returns the number of
        records and the acknowledgements that failed.
        """
        gone = {
            key: outcomes
            for key, outcomes in self._outcomes.items()
            if topic is None or key.topic == topic
        }
        failed: list[Acknowledgement] = []
        for key, outcomes in gone.items():
            acknowledged = sorted(
                offset
                for offset, outcome in outcomes.items()
                if outcome in OUTCOMES or outcome is REJECTING
            )
            _add_runs(failed, key, acknowledged, outcomes, len(acknowledged) + 1)
            del self._outcomes[key]
            self._locks.pop(key, None)
        self._renewed = {
            place: until_ns
            for place, until_ns in self._renewed.items()
            if place[0] in self._outcomes
        }
        return sum(map(len, gone.values())), failed


def _add_runs(
    runs: list[Acknowledgement],
    key: TopicPartition,
    acknowledged: list[int],
    outcomes: dict[int, str | None],
    runs_max: int,
) -> int:
    """Append ranges of `acknowledged` offsets to `runs`, up to `runs_max`. Returns the number of
    offsets.
    """
    first = last = -1
    outcome: str | None = None
    taken = 0
    for offset in acknowledged:
        if offset == last + 1 and outcomes[offset] == outcome:
            last = offset
        else:
            if outcome is not None:
                runs.append(Acknowledgement(key, first, last, outcome))
                if len(runs) >= runs_max:
                    return taken
            first = last = offset
            outcome = outcomes[offset]
        taken += 1
    if outcome is not None:
        runs.append(Acknowledgement(key, first, last, outcome))
    return taken
