"""What a share consumer holds: said, taken, put back, in runs; against a plain model."""

from __future__ import annotations

import random

import pytest

from tailrace.errors import InvalidRequestError
from tailrace.records import TopicPartition
from tailrace.share.held import OUTCOMES, REJECTING, Held, Said

KEY = TopicPartition("t", 0)


def test_what_was_said_is_taken_in_runs() -> None:
    held = Held()
    held.hold(KEY, 0, 9)
    held.hold(TopicPartition("u", 3), 5, 6, "accept")
    assert held.has_said
    for offset in (3, 1, 2, 7):
        held.say("t", 0, offset, "accept")
    held.say("t", 0, 4, "release")
    held.say("t", 0, 5, "renew")
    held.say("t", 0, 6, REJECTING)
    assert held.take(100) == [
        Said(KEY, 1, 3, "accept"), Said(KEY, 4, 4, "release"), Said(KEY, 5, 5, "renew"), Said(KEY, 7, 7, "accept"),
        Said(TopicPartition("u", 3), 5, 6, "accept"),
    ]  # fmt: skip
    with pytest.raises(InvalidRequestError, match="not this consumer's"):
        held.say("t", 0, 1, "accept")
    held.say("t", 0, 5, "accept")  # renewed: still held
    held.accept_rest()
    held.say("t", 0, 6, "reject")
    assert held.take(100) == [Said(KEY, 0, 0, "accept"), Said(KEY, 5, 5, "accept"), Said(KEY, 6, 6, "reject"), Said(KEY, 8, 9, "accept")]
    assert not held


def test_what_comes_back_does_not_take_the_place_of_what_was_said_since() -> None:
    held = Held()
    held.hold(KEY, 0, 3)
    held.say("t", 0, 0, "renew")
    held.say("t", 0, 1, "accept")
    taken = held.take(10)
    held.say("t", 0, 0, "release")
    held.put_back(taken)
    assert held.take(10) == [Said(KEY, 0, 0, "release"), Said(KEY, 1, 1, "accept")]
    held.say("t", 0, 3, "accept")
    assert held.clear() == (2, [Said(KEY, 3, 3, "accept")])
    assert held.take(10) == []


def test_what_is_kept_or_renewed_is_not_accepted_without_a_word() -> None:
    held = Held()
    held.hold(KEY, 0, 3)
    held.say("t", 0, 0, "accept")
    held.say("t", 0, 1, "renew")
    held.keep_rest()
    assert held.take(10) == [Said(KEY, 0, 0, "accept"), Said(KEY, 1, 1, "renew")]
    held.hold(KEY, 4, 5)
    held.accept_one("t", 0, 4)
    held.accept_one("t", 0, 1)
    held.accept_rest()
    assert held.take(10) == [Said(KEY, 4, 5, "accept")]
    held.say("t", 0, 1, "accept")
    held.say("t", 0, 2, REJECTING)
    held.hold(TopicPartition("u", 0), 0, 0)
    assert held.clear("t") == (3, [Said(KEY, 1, 1, "accept"), Said(KEY, 2, 2, REJECTING)])
    assert held.clear() == (1, [])
    assert not held.has_said


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_words_and_takes_sends_the_last_word_for_each_record_once(seed: int) -> None:
    chance = random.Random(seed)
    held = Held()
    said: dict[tuple[int, int], str | None] = {}
    following = [0, 0]
    for _ in range(300):
        what = chance.randrange(5)
        if what == 0:
            partition, count = chance.randrange(2), chance.randrange(1, 10)
            held.hold(TopicPartition("t", partition), following[partition], following[partition] + count - 1)
            said.update(((partition, offset), None) for offset in range(following[partition], following[partition] + count))
            following[partition] += count
        elif what < 4 and said:
            place = chance.choice(list(said))
            said[place] = outcome = chance.choice(OUTCOMES)
            held.say("t", *place, outcome)
        else:
            limit = chance.randrange(1, 6)
            runs = held.take(limit)
            assert len(runs) <= limit
            for key, first, last, outcome in runs:
                for offset in range(first, last + 1):
                    assert said.pop((key.partition, offset)) == outcome
                    if outcome == "renew":
                        said[key.partition, offset] = None
            assert len(runs) == limit or not any(said.values())
            if chance.randrange(4) == 0:
                held.put_back(runs)
                said.update(((run.key.partition, offset), run.outcome) for run in runs for offset in range(run.first, run.last + 1))
        assert held.has_said == any(said.values())
        assert bool(held) == bool(said)
