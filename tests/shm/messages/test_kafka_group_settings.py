"""Texts of groups' settings."""

from __future__ import annotations

import pytest

from shm.messages.kafka_group_settings import GROUPS_MAX, GroupValues, group_texts, parse_groups
from tailrace.core.errors import InvalidSettingError


def test_texts_of_groups_parsed_are_the_groups() -> None:
    groups: dict[str, GroupValues] = {
        "a b=c\n%": {"share.auto.offset.reset": "earliest", "share.session.timeout.ms": 9_000},
        "ü": {"consumer.session.timeout.ms": 10_000},
    }
    assert parse_groups(group_texts(groups)) == groups


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["group=a"], "group=NAME setting=value"),
        (["group=a x"], "group=NAME setting=value"),
        (["user=a share.auto.offset.reset=latest"], "group=NAME setting=value"),
        (["group= share.auto.offset.reset=latest"], "takes a name"),
        (["group=a share.auto.offset.reset=latest"] * 2, "one text for each group"),
        (["group=a share.session.timeout.ms=3000"], "must be below share.session.timeout.ms"),
        (["group=a share.session.timeout.ms=²"], "a whole number of ms"),
        ([f"group=a share.session.timeout.ms={'0' * 19}5{'9' * 30}"], "a whole number of ms"),
        (
            [f"group={n} share.auto.offset.reset=latest" for n in range(GROUPS_MAX + 1)],
            "remove those of groups that are gone",
        ),
    ],
)
def test_a_wrong_text_is_refused_with_a_sentence(texts: list[str], said: str) -> None:
    with pytest.raises(InvalidSettingError, match=said):
        parse_groups(texts)
