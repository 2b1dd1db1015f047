"""Records that a share consumer has been given and is not done with, and what its user has said of them.

    handed out --acknowledge()--> said --take()--> sent --answered--> forgotten
       |  '--accept_rest()---------^  ^                '-- renew --.
       '--keep_rest()--> kept --------'  <-------------------------'

Owner: one ShareConsumer, one thread.
Invariants: an offset is here from when its record was handed out until what was said of it is sent; what is sent and was certainly not carried out is put back.
What was left when others of its poll were acknowledged, or was renewed, is kept: only a word of the user's ends it.
"""

from __future__ import annotations

from typing import NamedTuple

from tailrace.errors import InvalidRequestError
from tailrace.records import TopicPartition

OUTCOMES = ("accept", "release", "reject", "renew")
REJECTING = "rejecting"
"""Said to be rejected, and not in the dead-letter topic yet: not to be sent."""
KEPT = "kept"
"""Nothing is said of it, and nothing is to be taken for a word."""
_SENT = frozenset(OUTCOMES)


class Said(NamedTuple):
    """What was said of offsets `first` to `last`."""

    key: TopicPartition
    first: int
    last: int
    outcome: str


class Held:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._outcomes: dict[TopicPartition, dict[int, str | None]] = {}
        """None: it was handed out, and nothing was said of it."""
        self._may_have_said = False

    def __bool__(self) -> bool:
        return any(self._outcomes.values())

    def hold(self, key: TopicPartition, first: int, last: int, outcome: str | None = None) -> None:
        """Offsets `first` to `last` are held from now on. `outcome`: what is said of them already."""
        self._outcomes.setdefault(key, {}).update(dict.fromkeys(range(first, last + 1), outcome))
        self._may_have_said = self._may_have_said or outcome is not None

    def say(self, topic: str, partition: int, offset: int, outcome: str) -> None:
        """What is to become of a record. Raises InvalidRequestError for one that is not held."""
        outcomes = self._outcomes.get((topic, partition))  # type: ignore[call-overload]  # a TopicPartition is a tuple, and takes its time to make
        if outcomes is None or offset not in outcomes:
            raise InvalidRequestError(
                f"offset {offset} of {topic}-{partition} is not this consumer's to acknowledge: it was not handed out here, was acknowledged before, "
                "or its lock is gone"
            )
        outcomes[offset] = outcome
        self._may_have_said = True

    def said_of(self, topic: str, partition: int, offset: int) -> str | None:
        """What was said of a record; None: nothing, or it is not held."""
        return self._outcomes.get(TopicPartition(topic, partition), {}).get(offset)

    def has(self, topic: str, partition: int, offset: int) -> bool:
        """Whether the record is held."""
        return offset in self._outcomes.get(TopicPartition(topic, partition), ())

    def accept_one(self, topic: str, partition: int, offset: int) -> None:
        """Accept a record if it is held and nothing was said of it."""
        outcomes = self._outcomes.get(TopicPartition(topic, partition), {})
        if outcomes.get(offset, KEPT) is None:
            outcomes[offset] = "accept"
            self._may_have_said = True

    @property
    def has_said(self) -> bool:
        """Whether there is something to send."""
        if self._may_have_said:
            self._may_have_said = any(outcome in _SENT for outcomes in self._outcomes.values() for outcome in outcomes.values())
        return self._may_have_said

    def accept_rest(self) -> None:
        """Accept all of which nothing was said, but for what is kept."""
        self._say_of_rest("accept")

    def keep_rest(self) -> None:
        """All of which nothing was said waits for a word."""
        self._say_of_rest(KEPT)

    def _say_of_rest(self, word: str) -> None:
        for outcomes in self._outcomes.values():
            for offset, outcome in outcomes.items():
                if outcome is None:
                    outcomes[offset] = word
                    self._may_have_said = True

    def take(self, runs_max: int) -> list[Said]:
        """Take what was said, up to so many runs of offsets."""
        runs: list[Said] = []
        for key, outcomes in self._outcomes.items():
            said = sorted(offset for offset, outcome in outcomes.items() if outcome in _SENT)
            taken = _add_runs(runs, key, said, outcomes, runs_max)
            for offset in said[:taken]:
                if outcomes[offset] == "renew":
                    outcomes[offset] = KEPT
                else:
                    del outcomes[offset]
            if len(runs) >= runs_max:
                break
        return runs

    def put_back(self, runs: list[Said]) -> None:
        """These were not sent, or not carried out. What was said since of a record that is renewed holds."""
        for key, first, last, outcome in runs:
            outcomes = self._outcomes.setdefault(key, {})
            for offset in range(first, last + 1):
                if outcomes.get(offset, KEPT) in (None, KEPT):
                    outcomes[offset] = outcome
        self._may_have_said = True

    def clear(self, topic: str | None = None) -> tuple[int, list[Said]]:
        """The locks are gone (of one topic only). Returns how many records were held, and what was said of them in vain."""
        gone = {key: outcomes for key, outcomes in self._outcomes.items() if topic is None or key.topic == topic}
        in_vain: list[Said] = []
        for key, outcomes in gone.items():
            said = sorted(offset for offset, outcome in outcomes.items() if outcome in _SENT or outcome is REJECTING)
            _add_runs(in_vain, key, said, outcomes, len(said) + 1)
            del self._outcomes[key]
        return sum(map(len, gone.values())), in_vain


def _add_runs(runs: list[Said], key: TopicPartition, said: list[int], outcomes: dict[int, str | None], runs_max: int) -> int:
    """Add offsets to `runs` until there are `runs_max` of these. Returns how many offsets were taken."""
    first = last = -1
    outcome: str | None = None
    taken = 0
    for offset in said:
        if offset == last + 1 and outcomes[offset] == outcome:
            last = offset
        else:
            if outcome is not None:
                runs.append(Said(key, first, last, outcome))
                if len(runs) >= runs_max:
                    return taken
            first = last = offset
            outcome = outcomes[offset]
        taken += 1
    if outcome is not None:
        runs.append(Said(key, first, last, outcome))
    return taken
