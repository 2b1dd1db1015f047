"""Transactions of `tailrace produce` and `tailrace perf`, over a front in memory."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from appliance.cli.commands.records.produce import command
from appliance.cli.perf.produce import produce
from appliance.cli.perf.timed_transactions import TimedTransactions
from appliance.cli.records.transactions import InputTransactions
from tailrace.core.errors import InvalidRecordError
from tests.conformance.logging_front import DrivenProducer
from tests.conformance.transactions.transaction_front import TransactionFront
from tests.conformance.transactions.transaction_worlds import SETTINGS


def made() -> tuple[TransactionFront, DrivenProducer]:
    front = TransactionFront(partitions=1)
    return front, DrivenProducer(front, **SETTINGS)


@pytest.mark.parametrize(("each", "commits"), [(None, 1), (2, 3), (5, 1), (1, 5)])
def test_the_input_is_one_transaction_or_one_for_each_so_many_records(
    each: int | None, commits: int
) -> None:
    front, driven = made()
    with driven.producer as producer, InputTransactions(producer, each, is_used=True) as blocks:
        for number in range(5):
            producer.send("t", b"%d" % number)
            blocks.add()
    assert [one.outcome for one in front.decisions[1:]] == ["commit"] * commits
    assert front.committed() == [b"%d" % number for number in range(5)]
    assert blocks.committed == 5


def test_an_error_aborts_the_open_transaction_and_counts_what_is_committed() -> None:
    front, driven = made()
    sent = 0

    def send_all() -> None:
        nonlocal sent
        with driven.producer as producer, InputTransactions(producer, 2, is_used=True) as blocks:
            for number in range(5):
                if number == 3:
                    raise InvalidRecordError("line 4 is bad")
                producer.send("t", b"%d" % number)
                blocks.add()
                sent += 1

    with pytest.raises(InvalidRecordError, match="line 4 is bad; 2 records are committed"):
        send_all()
    assert front.committed() == [b"0", b"1"]
    assert sent == 3


def test_slices_of_a_file_end_where_transactions_do() -> None:
    front, driven = made()
    with driven.producer as producer, InputTransactions(producer, 7, is_used=True) as blocks:
        rooms = []
        left = 20
        while left:
            size = min(blocks.room(5), left)
            rooms.append(size)
            left -= size
            blocks.add(size)
    assert rooms == [5, 2, 5, 2, 5, 1]
    assert InputTransactions(producer, None, is_used=False).room(5) == 5
    assert front.decisions[1:] == [], "nothing was sent"


def test_the_size_of_transactions_needs_a_transactional_id() -> None:
    result = CliRunner().invoke(command, ["t", "--transaction-records", "5"])
    assert result.exit_code == 2
    assert "needs --transactional" in result.output


def test_perf_produce_measures_commits() -> None:
    front, driven = made()
    found = produce(driven.producer, "t", [b"x" * 10], 200, -1, lambda *_: None, transaction_ms=0.0)
    assert found.commits is not None
    assert found.commits.count == len(front.decisions) - 1 > 1
    assert len(front.committed()) == 200
    driven.producer.close()


def test_a_run_without_records_commits_nothing() -> None:
    front, driven = made()
    transactions = TimedTransactions(driven.producer, 100)
    transactions.end()
    assert not transactions.is_due
    assert front.decisions == []
    driven.producer.close()
