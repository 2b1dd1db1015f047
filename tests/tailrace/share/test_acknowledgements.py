"""Acknowledgements of a share consumer: set, taken and put back in ranges, against a model."""

from __future__ import annotations

import random

import pytest

from tailrace.core.errors import InvalidRequestError
from tailrace.core.topic_partition import TopicPartition
from tailrace.share.acknowledgements import (
    REJECTING,
    RENEWALS,
    UNREAD,
    Acknowledgement,
    Acknowledgements,
)
from tailrace.share.outcomes import OUTCOMES
from tests.kit.matrices import short

KEY = TopicPartition("t", 0)


def take(acknowledgements: Acknowledgements, runs_max: int) -> list[Acknowledgement]:
    """The acknowledgements that a request would carry, sent."""
    runs = acknowledgements.acknowledged(runs_max)
    acknowledgements.sent(runs)
    return runs


def test_acknowledgements_are_taken_in_ranges() -> None:
    acknowledgements = Acknowledgements()
    acknowledgements.add(KEY, 0, 9)
    acknowledgements.add(TopicPartition("u", 3), 5, 6, "accept")
    assert acknowledgements.has_acknowledged
    for offset in (3, 1, 2, 7):
        acknowledgements.acknowledge("t", 0, offset, "accept")
    acknowledgements.acknowledge("t", 0, 4, "release")
    acknowledgements.acknowledge("t", 0, 5, "renew")
    acknowledgements.acknowledge("t", 0, 6, REJECTING)
    assert take(acknowledgements, 100) == [
        Acknowledgement(KEY, 1, 3, "accept"), Acknowledgement(KEY, 4, 4, "release"),
        Acknowledgement(KEY, 5, 5, "renew"), Acknowledgement(KEY, 7, 7, "accept"),
        Acknowledgement(TopicPartition("u", 3), 5, 6, "accept"),
    ]  # fmt: skip
    with pytest.raises(InvalidRequestError, match="not this consumer's"):
        acknowledgements.acknowledge("t", 0, 1, "accept")
    acknowledgements.acknowledge("t", 0, 5, "accept")  # renewed: still held
    acknowledgements.accept_remaining()
    acknowledgements.acknowledge("t", 0, 6, "reject")
    assert take(acknowledgements, 100) == [
        Acknowledgement(KEY, 0, 0, "accept"),
        Acknowledgement(KEY, 5, 5, "accept"),
        Acknowledgement(KEY, 6, 6, "reject"),
        Acknowledgement(KEY, 8, 9, "accept"),
    ]
    assert not acknowledgements


def test_a_put_back_acknowledgement_does_not_replace_a_newer_one() -> None:
    acknowledgements = Acknowledgements()
    acknowledgements.add(KEY, 0, 3)
    acknowledgements.acknowledge("t", 0, 0, "renew")
    acknowledgements.acknowledge("t", 0, 1, "accept")
    taken = take(acknowledgements, 10)
    acknowledgements.acknowledge("t", 0, 0, "release")
    acknowledgements.put_back(taken)
    assert take(acknowledgements, 10) == [
        Acknowledgement(KEY, 0, 0, "release"),
        Acknowledgement(KEY, 1, 1, "accept"),
    ]
    acknowledgements.acknowledge("t", 0, 3, "accept")
    assert acknowledgements.clear() == (2, [Acknowledgement(KEY, 3, 3, "accept")])
    assert take(acknowledgements, 10) == []


def test_retained_and_renewed_records_are_not_accepted_implicitly() -> None:
    acknowledgements = Acknowledgements()
    acknowledgements.add(KEY, 0, 3)
    acknowledgements.acknowledge("t", 0, 0, "accept")
    acknowledgements.acknowledge("t", 0, 1, "renew")
    acknowledgements.retain_remaining()
    assert take(acknowledgements, 10) == [
        Acknowledgement(KEY, 0, 0, "accept"),
        Acknowledgement(KEY, 1, 1, "renew"),
    ]
    acknowledgements.add(KEY, 4, 5)
    acknowledgements.accept_one("t", 0, 4)
    acknowledgements.accept_one("t", 0, 1)
    acknowledgements.accept_remaining()
    assert take(acknowledgements, 10) == [Acknowledgement(KEY, 4, 5, "accept")]
    acknowledgements.acknowledge("t", 0, 1, "accept")
    acknowledgements.acknowledge("t", 0, 2, REJECTING)
    acknowledgements.add(TopicPartition("u", 0), 0, 0)
    assert acknowledgements.clear("t") == (
        3,
        [Acknowledgement(KEY, 1, 1, "accept"), Acknowledgement(KEY, 2, 2, REJECTING)],
    )
    assert acknowledgements.clear() == (1, [])
    assert not acknowledgements.has_acknowledged


@pytest.mark.parametrize("seed", short(range(20), *range(7)))
def test_the_last_outcome_of_each_record_is_sent_once_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    acknowledgements = Acknowledgements()
    acknowledged: dict[tuple[int, int], str | None] = {}
    following = [0, 0]
    for _ in range(300):
        what = chance.randrange(5)
        if what == 0:
            partition, count = chance.randrange(2), chance.randrange(1, 10)
            acknowledgements.add(
                TopicPartition("t", partition),
                following[partition],
                following[partition] + count - 1,
            )
            acknowledged.update(
                ((partition, offset), None)
                for offset in range(following[partition], following[partition] + count)
            )
            following[partition] += count
        elif what < 4 and acknowledged:
            place = chance.choice(list(acknowledged))
            acknowledged[place] = outcome = chance.choice(OUTCOMES)
            acknowledgements.acknowledge("t", *place, outcome)
        else:
            limit = chance.randrange(1, 6)
            runs = take(acknowledgements, limit)
            assert len(runs) <= limit
            for key, first, last, outcome in runs:
                for offset in range(first, last + 1):
                    assert acknowledged.pop((key.partition, offset)) == outcome
                    if outcome == "renew":
                        acknowledged[key.partition, offset] = None
            assert len(runs) == limit or not any(acknowledged.values())
            if chance.randrange(4) == 0:
                acknowledgements.put_back(runs)
                acknowledged.update(
                    ((run.key.partition, offset), run.outcome)
                    for run in runs
                    for offset in range(run.first, run.last + 1)
                )
        assert acknowledgements.has_acknowledged == any(acknowledged.values())
        assert bool(acknowledgements) == bool(acknowledged)


def test_unacknowledged_records_are_forgotten_when_their_locks_expire() -> None:
    acknowledgements = Acknowledgements()
    for first in range(0, 16_000, 500):
        acknowledgements.add(KEY, first, first + 499, locked_until_ns=first + 1_000)
        acknowledgements.drop_expired(first)
        assert len(acknowledgements._outcomes[KEY]) <= 1_500, (
            "what is kept is bounded by the locks, not by what was handed out"
        )
    acknowledgements.acknowledge("t", 0, 15_999, "renew")
    acknowledgements.acknowledge("t", 0, 15_998, "accept")
    acknowledgements.renewed(KEY, 15_999, 15_999, 30_000)
    assert take(acknowledgements, 9) == [
        Acknowledgement(KEY, 15_998, 15_998, "accept"),
        Acknowledgement(KEY, 15_999, 15_999, "renew"),
    ]
    assert acknowledgements.drop_expired(20_000) > 0
    assert [acknowledgements.has("t", 0, offset) for offset in (15_997, 15_998, 15_999)] == [
        False,
        False,
        True,
    ]
    assert acknowledgements.drop_expired(30_000) == 1
    assert not acknowledgements
    assert not acknowledgements._locks
    assert not acknowledgements._renewed


def test_an_unread_record_is_released_and_cannot_be_acknowledged() -> None:
    acknowledgements = Acknowledgements()
    acknowledgements.add(KEY, 3, 5, UNREAD)
    assert not acknowledgements.has("t", 0, 4)
    with pytest.raises(InvalidRequestError, match="not this consumer's"):
        acknowledgements.acknowledge("t", 0, 4, "accept")
    assert acknowledgements.acknowledged(9) == [Acknowledgement(KEY, 3, 5, "unread")]
    assert acknowledgements.clear() == (3, []), "nothing of it is said in vain"


def test_a_transaction_keeps_its_records_from_every_other_acknowledgement() -> None:
    kept, key = Acknowledgements(), TopicPartition("t", 0)
    kept.add(key, 0, 3)
    places = [("t", 0, 0), ("t", 0, 1)]
    kept.attach(places)
    kept.accept_remaining()
    assert [run[1:] for run in kept.acknowledged(9)] == [(2, 3, "accept")]
    with pytest.raises(InvalidRequestError, match="with a transaction"):
        kept.acknowledge("t", 0, 0, "accept")
    for offset in (1, 2, 9):  # attached, accepted, never delivered
        with pytest.raises(InvalidRequestError, match="cannot be acknowledged with"):
            kept.check_attachable("t", 0, offset)
    kept.detach(places[:1], is_committed=True)
    kept.detach(places[1:], is_committed=False)
    kept.detach(places, is_committed=True)  # repeated
    assert [run[1:] for run in kept.acknowledged(9)] == [(1, 1, "release"), (2, 3, "accept")]
    kept.check_attachable("t", 0, 1)  # a repeated block takes it
    assert not kept.has("t", 0, 0)


def test_a_lock_that_has_passed_ends_the_claim_of_a_transaction() -> None:
    kept, key = Acknowledgements(), TopicPartition("t", 0)
    kept.add(key, 0, 0, None, 10)
    kept.attach([("t", 0, 0)])
    assert kept.drop_expired(10) == 1
    kept.add(key, 0, 0, None, 30)  # delivered once more
    kept.detach([("t", 0, 0)], is_committed=False)
    assert kept.acknowledged(9) == []


def test_the_lock_of_a_record_in_a_transaction_is_renewed_and_the_record_stays_there() -> None:
    kept, key, place = Acknowledgements(), TopicPartition("t", 0), ("t", 0, 0)
    kept.add(key, 0, 0, None, 10)
    kept.attach([place])
    kept.acknowledge(*place, "renew")
    with pytest.raises(InvalidRequestError, match="can only be renewed"):
        kept.acknowledge(*place, "release")
    with pytest.raises(InvalidRequestError, match="in a transaction already"):
        kept.check_attachable(*place)
    (run,) = runs = kept.acknowledged(9)
    assert run.outcome in RENEWALS
    kept.sent(runs)
    assert kept.acknowledged(9) == []
    kept.put_back(runs)  # it was not applied
    assert kept.acknowledged(9) == runs
    kept.sent(runs)
    kept.renewed(key, 0, 0, 30)
    assert kept.drop_expired(10) == 0
    kept.detach([place], is_committed=False)
    assert [one.outcome for one in kept.acknowledged(9)] == ["release"]


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_renewal_that_was_not_sent_ends_with_the_transaction(is_committed: bool) -> None:
    kept, key, place = Acknowledgements(), TopicPartition("t", 0), ("t", 0, 0)
    kept.add(key, 0, 0)
    kept.attach([place])
    kept.acknowledge(*place, "renew")
    runs = kept.acknowledged(9)
    kept.sent(runs)
    kept.detach([place], is_committed=is_committed)
    kept.put_back(runs)
    found = [one.outcome for one in kept.acknowledged(9)]
    assert found == ([] if is_committed else ["release"])
