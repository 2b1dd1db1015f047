"""Records that a share consumer has been given and is not done with, and what its user has said of them.

    handed out --acknowledge()--> said --take()--> sent --answered--> forgotten
        ^------------------------------ renew ------------'

Owner: one ShareConsumer, one thread.
Invariants: an offset is here from when its record was handed out until what was said of it is sent; what is sent and was certainly not carried out is put back.
"""

from __future__ import annotations

from typing import NamedTuple

from tailrace.errors import InvalidRequestError
from tailrace.records import TopicPartition

OUTCOMES = ("accept", "release", "reject", "renew")
REJECTING = "rejecting"
"""Said to be rejected, and not in the dead-letter topic yet: not to be sent."""


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

    def __bool__(self) -> bool:
        return any(self._outcomes.values())

    def hold(self, key: TopicPartition, first: int, last: int, outcome: str | None = None) -> None:
        """Offsets `first` to `last` are held from now on. `outcome`: what is said of them already."""
        self._outcomes.setdefault(key, {}).update(dict.fromkeys(range(first, last + 1), outcome))

    def drop(self, topic: str, partition: int, offset: int) -> None:
        """The record was not handed out after all."""
        self._outcomes.get(TopicPartition(topic, partition), {}).pop(offset, None)

    def say(self, topic: str, partition: int, offset: int, outcome: str) -> None:
        """What is to become of a record. Raises InvalidRequestError for one that is not held."""
        outcomes = self._outcomes.get(TopicPartition(topic, partition))
        if outcomes is None or offset not in outcomes:
            raise InvalidRequestError(
                f"offset {offset} of {topic}-{partition} is not this consumer's to acknowledge: it was not handed out here, or was acknowledged before"
            )
        outcomes[offset] = outcome

    def said_of(self, topic: str, partition: int, offset: int) -> str | None:
        """What was said of a record; None: nothing, or it is not held."""
        return self._outcomes.get(TopicPartition(topic, partition), {}).get(offset)

    def has(self, topic: str, partition: int, offset: int) -> bool:
        """Whether the record is held."""
        return offset in self._outcomes.get(TopicPartition(topic, partition), ())

    @property
    def has_said(self) -> bool:
        """Whether there is something to send."""
        return any(
            outcome is not None and outcome is not REJECTING for outcomes in self._outcomes.values() for outcome in outcomes.values()
        )

    def accept_rest(self) -> None:
        """Accept all of which nothing was said."""
        for outcomes in self._outcomes.values():
            for offset, outcome in outcomes.items():
                if outcome is None:
                    outcomes[offset] = "accept"

    def take(self, runs_max: int) -> list[Said]:
        """Take what was said, up to so many runs of offsets."""
        runs: list[Said] = []
        for key, outcomes in self._outcomes.items():
            said = sorted(offset for offset, outcome in outcomes.items() if outcome is not None and outcome is not REJECTING)
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
                            outcome = None
                            break
                    first = last = offset
                    outcome = outcomes[offset]
                taken += 1
            if outcome is not None:
                runs.append(Said(key, first, last, outcome))
            for offset in said[:taken]:
                if outcomes[offset] == "renew":
                    outcomes[offset] = None
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
                if outcomes.get(offset) is None:
                    outcomes[offset] = outcome

    def clear(self) -> int:
        """The locks are gone. Returns how many records were held."""
        count = sum(map(len, self._outcomes.values()))
        self._outcomes.clear()
        return count
