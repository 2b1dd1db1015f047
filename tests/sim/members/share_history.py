"""Promises of a share group to its members, held against what they were told and what they said.

Owner: one `tests.sim.schedule.Schedule`.
Invariants, while the log loses nothing: a record is given out as the n-th time once for each n, and
    never more often than the limit; nobody is given a record while another member has a lock on it
    that has not passed; what is said under such a lock is taken, what is said under one that has
    moved on is refused; what was accepted is not given out again. At rest every record was
    accepted, rejected, or is a dead letter.

Members see requests and answers, not when the appliance carried them out: a lock begins before its
answer and not before its request, so it lasts at least until the request's time and the lock's
duration. Whether a member was one all the time shows when its next heartbeat is answered; until
then what speaks against the appliance is a suspicion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """Place of a record."""

    partition: int
    offset: int


@dataclass(slots=True, eq=False)
class Delivery:
    """A record that a member was given. `until_ns`: its lock does not pass earlier; `spoken_ns`:
    since when the member may have given it back.
    """

    place: Place
    member: str
    count: int
    is_dead: bool
    asked_ns: int
    told_ns: int
    until_ns: int
    spoken_ns: int | None = None

    def is_behind(self, other: Delivery) -> bool:
        """True if the delivery is the later one of two of the same record."""
        mine, others = (self.count, self.is_dead), (other.count, other.is_dead)
        return mine > others or (mine == others and self.asked_ns > other.told_ns)

    def __str__(self) -> str:
        kind = "dead, " if self.is_dead else ""
        return (
            f"{self.place} to {self.member[:6]} ({kind}{self.count}. time, asked "
            f"{self.asked_ns}, told {self.told_ns}, until {self.until_ns})"
        )


class Suspicion(NamedTuple):
    """Wrong, if its member still was one then."""

    at_ns: int
    sentence: str


@dataclass(slots=True)
class QueueHistory:
    """All members of the group together."""

    partitions: int
    delivery_limit: int
    may_lose: bool
    """The log may lose what readers saw: offsets do not name records."""
    may_delete: bool
    deliveries: dict[Place, list[Delivery]] = field(default_factory=dict)
    taken: dict[Place, tuple[int, Delivery]] = field(default_factory=dict)
    """Records that were accepted or rejected: when that was answered, and under which lock."""
    handled: dict[Place, int] = field(default_factory=dict)
    """Records that a member is done with (accepted, rejected or written to the dead letters), and
    when last.
    """
    suspicions: dict[str, list[Suspicion]] = field(default_factory=dict)

    def given(self, delivery: Delivery) -> None:
        """A member was told that it has a record."""
        assert 0 <= delivery.place.partition < self.partitions
        assert 1 <= delivery.count <= self.delivery_limit, (
            f"beyond the limit of {self.delivery_limit}: {delivery}"
        )
        assert not delivery.is_dead or delivery.count == self.delivery_limit, (
            f"dead too early: {delivery}"
        )
        if self.may_lose:
            return
        done = self.taken.get(delivery.place)
        assert done is None or delivery.asked_ns <= done[0], (
            f"given out again: {delivery}; it was done with at {done and done[0]}"
        )
        others = self.deliveries.setdefault(delivery.place, [])
        for other in others:
            same = not delivery.is_dead and not other.is_dead and delivery.count == other.count
            assert not same, f"given out twice as the same delivery: {delivery}, {other}"
            if (
                delivery.is_behind(other)
                and other.spoken_ns is None
                and delivery.told_ns < other.until_ns
            ):
                self._suspect(
                    other.member, delivery.told_ns, f"two locks at once: {delivery}, {other}"
                )
        others.append(delivery)

    def kept(self, delivery: Delivery, asked_ns: int, now_ns: int) -> None:
        """Its member has accepted or rejected the record, and that was taken."""
        if self.may_lose:
            return
        known = self.taken.get(delivery.place)
        assert known is None, f"taken twice: {delivery}, and {known and known[1]}"
        for other in self.deliveries[delivery.place]:
            stale = (
                other.member != delivery.member
                and other.is_behind(delivery)
                and other.told_ns < asked_ns
            )
            assert not stale, f"taken under a lock that had moved on: {delivery}, and {other}"
        self.taken[delivery.place] = now_ns, delivery

    def refused(self, delivery: Delivery, now_ns: int) -> None:
        """Check a refused acknowledgement: its lock has passed."""
        if not self.may_lose and not self.may_delete and now_ns < delivery.until_ns:
            self._suspect(
                delivery.member, now_ns, f"refused under a lock that had not passed: {delivery}"
            )

    def still_member(self, member: str, since_ns: int) -> None:
        """A heartbeat that was sent at `since_ns` was answered: it was a member all the time until
        then.
        """
        for suspicion in self.suspicions.get(member, ()):
            assert suspicion.at_ns >= since_ns, suspicion.sentence

    def _suspect(self, member: str, at_ns: int, sentence: str) -> None:
        self.suspicions.setdefault(member, []).append(Suspicion(at_ns, sentence))

    def check(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """At rest: nothing between the beginning and the end of a log was missed."""
        if self.may_lose:
            return
        for partition, end in ends.items():
            missed = [
                offset
                for offset in range(starts[partition], end)
                if Place(partition, offset) not in self.handled
            ]
            assert not missed, (
                f"partition {partition}: the queue has passed {missed[:5]} of {len(missed)} "
                "records over"
            )
            beyond = [
                place
                for place in self.deliveries
                if place.partition == partition and place.offset >= end
            ]
            assert not beyond, f"given out and not there: {beyond[:5]}"

    def check_losses(
        self,
        readable: Mapping[int, Sequence[tuple[int, bytes]]],
        sent_ns: Mapping[bytes, int],
        losses_ns: Sequence[int],
    ) -> None:
        """Check that the successor of a record that a power failure took is not passed over with
        it. `readable`: partition -> (offset, value).
        """
        for partition, records in readable.items():
            for offset, value in records:
                lost_ns = max(
                    (loss_ns for loss_ns in losses_ns if loss_ns <= sent_ns[value]), default=0
                )
                handled_ns = self.handled.get(Place(partition, offset), -1)
                assert handled_ns >= lost_ns, (
                    f"{value!r} at {partition}/{offset} was sent after {lost_ns}, and handled "
                    f"last at {handled_ns}"
                )
