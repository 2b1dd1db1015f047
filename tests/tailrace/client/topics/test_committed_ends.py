"""The end of committed records, asked for while markers of decided transactions are written."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.client.connections.steps import Steps, Wait
from tailrace.client.topics import list_offsets as module
from tailrace.client.topics.list_offsets import list_offsets
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.frame import Api

KEY = TopicPartition("t", 0)


class Answers:
    """An appliance that answers with these (end, progress of decisions), the last one for ever."""

    def __init__(self, *answers: tuple[int, dict[str, int]]) -> None:
        self.answers = list(answers)
        self.asked = 0

    def call(self, api: Api, _request: dict[str, Any]) -> Steps[dict[str, Any]]:
        assert api is Api.LIST_OFFSETS
        end, progress = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        entry = {"topic": "t", "partition": 0, "code": 0, "offset": end}
        yield from ()
        return {"offsets": [entry], **progress}


def found(answers: Answers) -> tuple[int, int]:
    """(the end, the number of waits)."""
    steps, waits = list_offsets(answers.call, [(KEY, "latest")]), 0
    try:
        while True:
            assert isinstance(next(steps), Wait)
            waits += 1
    except StopIteration as end:
        return end.value[KEY]["offset"], waits


def progress(decided: int, carried_out: int) -> dict[str, int]:
    return {"decided": decided, "carried_out": carried_out}


def test_the_end_lies_behind_what_was_decided_before_the_first_question() -> None:
    answers = Answers((3, progress(9, 7)), (3, progress(10, 8)), (5, progress(11, 9)), (8, {}))
    assert found(answers) == (5, 2)
    assert found(Answers((3, progress(9, 7)), (6, {}))) == (6, 1)


def test_an_open_transaction_alone_keeps_nobody_waiting() -> None:
    assert found(Answers((3, progress(9, 9)))) == (3, 0)
    assert found(Answers((3, progress(0, 0)))) == (3, 0)
    assert found(Answers((3, {}))) == (3, 0)


def test_a_marker_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CARRIED_OUT_MAX_NS", 0)
    assert found(Answers((3, progress(9, 7)))) == (3, 0)
