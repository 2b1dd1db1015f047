"""Credits: the module's invariants under random use; order; one batch always fits; lapse."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from netfront.credits import Credit, CreditLedger

BATCH = 100
STEPS = st.lists(st.tuples(st.sampled_from(["open", "send", "release", "ask", "close", "lapse"]), st.integers(0, 9)), max_size=200)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(100, 1000))
def test_credit_is_bounded_and_nobody_starves(steps: list[tuple[str, int]], budget: int) -> None:
    ledger = CreditLedger(budget, 400, BATCH)
    accounts: list[Credit] = []
    under_way: dict[int, list[int]] = {}
    for step, number in steps:
        if step == "open" and len(accounts) < 10:
            account = ledger.open()
            accounts.append(account)
            under_way[id(account)] = []
        elif accounts:
            account = accounts[number % len(accounts)]
            queue = under_way[id(account)]
            if step == "send":
                size = min(BATCH, account.limit - account.received)
                if size > 0:
                    assert ledger.receive(account, size), "within its limit a request is never refused"
                    queue.append(size)
            elif step == "release" and queue:
                ledger.release(account, queue.pop(0))
            elif step == "ask":
                ledger.ask(account)
            elif step == "lapse":
                ledger.lapse(account)
            elif step == "close":
                accounts.remove(account)
                ledger.close(account)
        assert ledger.shared_bytes <= budget
        assert ledger.shared_bytes == sum(max(0, a.limit - a.released - BATCH) for a in accounts)
        for account in accounts:
            assert account.released <= account.received <= account.limit <= account.granted
            assert account.limit >= account.released + BATCH, "one batch always fits"


def test_connections_that_only_exist_cost_the_budget_nothing() -> None:
    ledger = CreditLedger(300, 400, BATCH)
    for _ in range(1000):
        ledger.open()
    busy = ledger.open()
    ledger.receive(busy, BATCH)
    assert ledger.release(busy, BATCH) == [busy]
    assert busy.limit == BATCH + 400, "its window, as if it were alone"


def test_who_waits_is_served_in_order() -> None:
    ledger = CreditLedger(300, 400, BATCH)
    greedy, second, third = ledger.open(), ledger.open(), ledger.open()
    assert ledger.ask(greedy) == [greedy]
    assert ledger.shared_bytes == 300
    for account in (greedy, second, third):
        ledger.receive(account, BATCH)
    ledger.receive(greedy, 300)
    assert ledger.ask(second) == []
    assert ledger.ask(third) == []
    raised = ledger.release(greedy, BATCH)
    assert raised[0] is second
    raised = ledger.release(greedy, 300)
    assert third in raised


def test_more_than_was_ever_granted_is_a_violation_and_what_lapsed_is_not() -> None:
    ledger = CreditLedger(1000, 400, BATCH)
    account = ledger.open()
    ledger.receive(account, BATCH)
    ledger.release(account, BATCH)
    assert account.limit == BATCH + 400
    ledger.lapse(account)
    assert account.limit == 2 * BATCH
    assert ledger.receive(account, 400), "it was on its way when it lapsed"
    assert not ledger.receive(account, 1)
