"""Records that a share consumer has been given and is not done with, and what its user has said of
them.

    handed out --acknowledge()--> said --take()--> sent --answered--> forgotten
       |  '--accept_rest()---------^  ^                '-- renew --.
       '--keep_rest()--> kept --------'  <-------------------------'

Owner: one ShareConsumer, one thread.
Invariants: an offset is here from when its record was handed out until what was said of it is sent,
    or until its lock has passed without a word (`drop_expired`); what is sent and was certainly not
    carried out is put back.
What was left when others of its poll were acknowledged, or was renewed, or was handed out by a loop
that was left, is kept: only a word of the user's ends it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tailrace.core.errors import InvalidRequestError
from tailrace.core.topic_partition import TopicPartition

OUTCOMES = ("accept", "release", "reject", "renew")
REJECTING = "rejecting"
"""Said to be rejected, and not in the dead-letter topic yet: not to be sent."""
RETAINED = "kept"
"""Nothing is said of it, and nothing is to be taken for a word."""
IN_LOOP = "in a loop"
"""A loop has handed it out and not asked for the next one: nothing is said of it."""
UNREAD = "unread"
"""The program was never given it: its acquisition is no delivery."""
_SENT = frozenset(OUTCOMES) | {UNREAD}
_SILENT = frozenset({None, RETAINED, IN_LOOP})
NEVER_NS = 1 << 62


class Acknowledgement(NamedTuple):
    """What was said of offsets `first` to `last`."""

    key: TopicPartition
    first: int
    last: int
    outcome: str


class Acknowledgements:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._outcomes: dict[TopicPartition, dict[int, str | None]] = {}
        """None: it was handed out, and nothing was said of it."""
        self._locks: dict[TopicPartition, deque[tuple[int, int, int]]] = {}
        """(until when, first, last offset), in the order of their locks."""
        self._renewed: dict[tuple[TopicPartition, int], int] = {}
        """Until when a lock lasts that was renewed."""
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
        """Offsets `first` to `last` are held from now on. `outcome`: what is said of them
        already.
        """
        self._outcomes.setdefault(key, {}).update(dict.fromkeys(range(first, last + 1), outcome))
        self._may_have_acknowledged = self._may_have_acknowledged or outcome in _SENT
        if locked_until_ns != NEVER_NS:
            self._locks.setdefault(key, deque()).append((locked_until_ns, first, last))

    def renewed(self, key: TopicPartition, first: int, last: int, locked_until_ns: int) -> None:
        """The locks of these last longer."""
        self._renewed.update(
            dict.fromkeys(((key, offset) for offset in range(first, last + 1)), locked_until_ns)
        )
        self._locks.setdefault(key, deque()).append((locked_until_ns, first, last))

    def drop_expired(self, now_ns: int) -> int:
        """Forget those of which nothing was said while their locks lasted: they come again. Returns
        how many.
        """
        count = 0
        for key in [key for key, locks in self._locks.items() if locks[0][0] <= now_ns]:
            locks, outcomes = self._locks[key], self._outcomes.get(key, {})
            while locks and locks[0][0] <= now_ns:
                _, first, last = locks.popleft()
                for offset in range(first, last + 1):
                    if (
                        outcomes.get(offset, UNREAD) in _SILENT
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
        """What is to become of a record. Raises InvalidRequestError for one that is not held."""
        outcomes = self._outcomes.get((topic, partition))  # type: ignore[call-overload]  # a TopicPartition is a tuple, and takes its time to make
        if outcomes is None or outcomes.get(offset, UNREAD) is UNREAD:
            raise InvalidRequestError(
                f"offset {offset} of {topic}-{partition} is not this consumer's to acknowledge: "
                "it was not handed out here, was acknowledged before, "
                "or its lock is gone"
            )
        outcomes[offset] = outcome
        self._may_have_acknowledged = True

    def outcome_of(self, topic: str, partition: int, offset: int) -> str | None:
        """What was said of a record; None: nothing, or it is not held."""
        return self._outcomes.get(TopicPartition(topic, partition), {}).get(offset)

    def has(self, topic: str, partition: int, offset: int) -> bool:
        """Whether the record is held."""
        return (
            self._outcomes.get(TopicPartition(topic, partition), {}).get(offset, UNREAD)
            is not UNREAD
        )

    def accept_one(self, topic: str, partition: int, offset: int) -> None:
        """Accept a record if it is held and nothing was said of it."""
        outcomes = self._outcomes.get(TopicPartition(topic, partition), {})
        if outcomes.get(offset, RETAINED) in (None, IN_LOOP):
            outcomes[offset] = "accept"
            self._may_have_acknowledged = True

    def keep_one(self, topic: str, partition: int, offset: int) -> None:
        """A record that a loop has handed out waits for a word."""
        outcomes = self._outcomes.get(TopicPartition(topic, partition), {})
        if outcomes.get(offset) is IN_LOOP:
            outcomes[offset] = RETAINED

    @property
    def has_acknowledged(self) -> bool:
        """Whether there is something to send."""
        if self._may_have_acknowledged:
            self._may_have_acknowledged = any(
                outcome in _SENT
                for outcomes in self._outcomes.values()
                for outcome in outcomes.values()
            )
        return self._may_have_acknowledged

    def accept_remaining(self) -> None:
        """Accept all of which nothing was said, but for what is kept."""
        self._acknowledge_remaining("accept")

    def leave_loop(self, topic: str, partition: int, offset: int) -> None:
        """A record that a loop has handed out is as one of a poll."""
        outcomes = self._outcomes.get(TopicPartition(topic, partition), {})
        if outcomes.get(offset) is IN_LOOP:
            outcomes[offset] = None

    def accept_in_loops(self) -> None:
        """Accept what loops have handed out and not asked beyond."""
        for outcomes in self._outcomes.values():
            for offset, outcome in outcomes.items():
                if outcome is IN_LOOP:
                    outcomes[offset] = "accept"
                    self._may_have_acknowledged = True

    def retain_remaining(self) -> None:
        """All of which nothing was said waits for a word."""
        self._acknowledge_remaining(RETAINED)

    def _acknowledge_remaining(self, word: str) -> None:
        for outcomes in self._outcomes.values():
            for offset, outcome in outcomes.items():
                if outcome is None:
                    outcomes[offset] = word
                    self._may_have_acknowledged = True

    def take(self, runs_max: int) -> list[Acknowledgement]:
        """Take what was said, up to so many runs of offsets."""
        runs = self.acknowledged(runs_max)
        self.sent(runs)
        return runs

    def acknowledged(self, runs_max: int) -> list[Acknowledgement]:
        """What was said, up to so many runs of offsets; it stays here until `sent`."""
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
        """A request says these from now on. A second time it does nothing, if nothing else was said
        between.
        """
        for key, first, last, outcome in runs:
            outcomes = self._outcomes.get(key, {})
            for offset in range(first, last + 1):
                if outcomes.get(offset) == outcome:
                    if outcome == "renew":
                        outcomes[offset] = RETAINED
                    else:
                        del outcomes[offset]

    def put_back(self, runs: list[Acknowledgement]) -> None:
        """These were not sent, or not carried out. What was said since of a record that is renewed
        holds.
        """
        for key, first, last, outcome in runs:
            outcomes = self._outcomes.setdefault(key, {})
            for offset in range(first, last + 1):
                if outcomes.get(offset, RETAINED) in _SILENT:
                    outcomes[offset] = outcome
        self._may_have_acknowledged = True

    def clear(self, topic: str | None = None) -> tuple[int, list[Acknowledgement]]:
        """The locks are gone (of one topic only). Returns how many records were held, and what was
        said of them in vain.
        """
        gone = {
            key: outcomes
            for key, outcomes in self._outcomes.items()
            if topic is None or key.topic == topic
        }
        in_vain: list[Acknowledgement] = []
        for key, outcomes in gone.items():
            acknowledged = sorted(
                offset
                for offset, outcome in outcomes.items()
                if outcome in OUTCOMES or outcome is REJECTING
            )
            _add_runs(in_vain, key, acknowledged, outcomes, len(acknowledged) + 1)
            del self._outcomes[key]
            self._locks.pop(key, None)
        self._renewed = {
            place: until_ns
            for place, until_ns in self._renewed.items()
            if place[0] in self._outcomes
        }
        return sum(map(len, gone.values())), in_vain


def _add_runs(
    runs: list[Acknowledgement],
    key: TopicPartition,
    acknowledged: list[int],
    outcomes: dict[int, str | None],
    runs_max: int,
) -> int:
    """Add offsets to `runs` until there are `runs_max` of these. Returns how many offsets were
    taken.
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
