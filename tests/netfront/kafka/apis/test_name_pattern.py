"""Patterns of topic names match what regular expressions match, in linear time."""

from __future__ import annotations

import random
import re

import pytest

from netfront.kafka.apis.call import RefusedError
from netfront.kafka.apis.groups.name_pattern import NamePattern, PatternError
from netfront.kafka.apis.groups.topic_patterns import checked_pattern
from netfront.kafka.wire.errors import KafkaError

ATOMS = ("a", "b", "c", ".", "[ab]", "[^a]", r"\.", r"\d", "[]x]")
REPEATS = ("*", "+", "?", "{2}", "{0,2}", "{1,}", "{0}", "{1,3}", "*?")


def made(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(7) if depth else 0
    if not kind:
        return rng.choice(ATOMS)
    one, other = made(rng, depth - 1), made(rng, depth - 1)
    return (
        one + other, f"({one}|{other})", f"(|{one})", f"(?:{one})", f"({one}){rng.choice(REPEATS)}",
        f"(^{one}|{other}$)",
    )[kind - 1]  # fmt: skip


def test_a_pattern_matches_as_a_regular_expression_does() -> None:
    rng = random.Random(7)
    count = 0
    for _ in range(2_000):
        text = made(rng, 4)
        names = ["".join(rng.choice("ab.1") for _ in range(rng.randrange(1, 7))) for _ in range(10)]
        try:
            pattern = NamePattern(text)
        except PatternError:
            continue  # with its repetitions written out it is too large
        count += 1
        expected = [name for name in names if re.fullmatch(text, name)]
        assert list(pattern.matching(names)) == expected, text
    assert count > 1_500


@pytest.mark.parametrize(
    "text",
    [
        "(|.)" * 60 + "Z", "(a*)*Z", "(a|aa)+Z", "(.*.*)*Z", ".*" * 100 + "Z", "a*b*c*d*Z",
        "((a?){10}){10}Z", "(((((a*)*)*)*)*)*Z", "(.*a){60}Z",
    ],
)  # fmt: skip
def test_patterns_that_try_all_ways_elsewhere_take_a_step_a_character(text: str) -> None:
    names = [f"{'a' * 240}{number}" for number in range(100)]
    pattern = checked_pattern(text)
    assert list(pattern.matching(names)) == []
    assert pattern.matches("a" * 60 + "Z")


@pytest.mark.parametrize(
    "text",
    [
        "(?=x)", r"(a)\1", "x" * 300, "[", "a{1,", "*", "a**", "a++", "(", "a)", "(?i)a", r"\b",
        "(" * 20 + ")" * 20, "(){1000}", "((){200}){200}", "(a{20}){20}", "a{3,2}", "[b-a]",
    ],
)  # fmt: skip
def test_other_patterns_are_refused_with_a_reason(text: str) -> None:
    with pytest.raises(RefusedError, match="or subscribe to names") as refused:
        checked_pattern(text)
    assert refused.value.code is KafkaError.INVALID_REGULAR_EXPRESSION


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("orders", "orders"), ("orders.*", "orders-1"), ("(orders|trades)-[0-9]+", "trades-17"),
        (r"a\.b", "a.b"), (".*", "x"), ("^a|^b", "b"), ("^(?:eu-)?orders$", "orders"),
        (r"\w{3}-\d{2,4}", "abc-123"),
    ],
)  # fmt: skip
def test_patterns_of_use_are_taken(text: str, name: str) -> None:
    assert checked_pattern(text).matches(name)
    assert not checked_pattern(text).matches(f"-{name}") or text == ".*"
