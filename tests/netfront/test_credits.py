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
        # The budget may be passed by one batch a connection, that which always fits.
        assert ledger.outstanding <= budget + BATCH * len(accounts)
        assert ledger.outstanding == sum(a.limit - a.released for a in accounts)
        for account in accounts:
            assert account.released <= account.received <= account.limit <= account.granted
    # Everything under way leaves; then whoever asks gets a batch.
    for account in accounts:
        for size in under_way[id(account)]:
            ledger.release(account, size)
        ledger.lapse(account)
    for account in accounts:
        ledger.ask(account)
        assert account.limit - account.received >= BATCH or account.is_waiting
    assert not accounts or any(a.limit - a.received >= BATCH for a in accounts)


def test_who_waits_is_served_in_order() -> None:
    ledger = CreditLedger(200, 100, BATCH)
    first, second, third = ledger.open(), ledger.open(), ledger.open()
    for account in (first, second, third):
        ledger.receive(account, BATCH)
    assert ledger.ask(second) == []
    assert ledger.ask(third) == []
    # One batch leaves, but the third connection's still overdraws the budget: the second is served before the third.
    raised: list[Credit] = []
    for account in (first, second, third):
        raised += [a for a in ledger.release(account, BATCH) if a not in raised]
    assert raised.index(second) < raised.index(third)


def test_more_than_was_ever_granted_is_a_violation_and_what_lapsed_is_not() -> None:
    ledger = CreditLedger(1000, 400, BATCH)
    account = ledger.open()
    assert account.limit == 400
    ledger.lapse(account)
    assert account.limit == BATCH
    assert ledger.receive(account, 400), "it was on its way when it lapsed"
    assert not ledger.receive(account, 1)
