"""Credits: the module's invariants under random use; everything within one budget however many
connections; order; what lapsed is debt.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from netfront.socket.flow_control import Credit, CreditLedger

BATCH = 100
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "send", "overdraw", "release", "ask", "close", "lapse", "sweep"]),
        st.integers(0, 29),
        st.integers(1, BATCH),
    ),
    max_size=300,
)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(100, 1000))
def test_all_that_is_held_comes_out_of_the_budget_and_nobody_starves(
    steps: list[tuple[str, int, int]], budget: int
) -> None:
    ledger = CreditLedger(budget, 400, BATCH)
    accounts: list[Credit] = []
    under_way: dict[Credit, list[int]] = {}
    for step, number, size in steps:
        if step == "open" and len(accounts) < 30:
            accounts.append(ledger.open())
            under_way[accounts[-1]] = []
        elif step == "sweep":
            ledger.sweep()
        elif accounts:
            account = accounts[number % len(accounts)]
            queue = under_way[account]
            if step == "send" and account.limit - account.received >= size:
                assert ledger.receive(account, size), "within its limit a request is never refused"
                queue.append(size)
            elif step == "overdraw" and account.granted - account.received >= size:
                if ledger.receive(account, size):
                    queue.append(size)
                else:
                    assert ledger.outstanding_bytes > 2 * budget
                    ledger.release(account, size)
            elif step == "release" and queue:
                ledger.release(account, queue.pop(0))
            elif step == "ask":
                ledger.ask(account, size)
            elif step == "lapse":
                ledger.lapse(account)
            elif step == "close":
                accounts.remove(account)
                del under_way[account]
                ledger.close(account)
        assert ledger.outstanding_bytes == sum(a.limit - a.released for a in accounts)
        assert sum(sum(queue) for queue in under_way.values()) <= 2 * budget
        for account in accounts:
            assert account.released <= account.received <= account.limit
            assert account.received - account.released == sum(under_way[account])
    # However it came to this: when what is under way has left and what is not used was taken back,
    # everyone who asks is served in its turn.
    for account in accounts:
        for size in under_way[account]:
            ledger.release(account, size)
    for account in accounts:
        ledger.ask(account, BATCH)
    for _ in range(2 * len(accounts) + 2):
        ledger.sweep()
    assert not ledger.is_contended


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2000), st.integers(100, 3000))
def test_however_many_connect_and_send_no_more_is_under_way_than_the_budget(
    count: int, budget: int
) -> None:
    ledger = CreditLedger(budget, 400, BATCH)
    accounts = [ledger.open() for _ in range(count)]
    for account in accounts:
        ledger.ask(account, BATCH)
    for account in accounts:
        if account.limit >= BATCH:
            ledger.receive(account, account.limit)
    assert sum(account.received for account in accounts) <= budget
    assert ledger.outstanding_bytes <= budget


def test_one_alone_gets_its_whole_window() -> None:
    ledger = CreditLedger(3000, 400, BATCH)
    busy = ledger.open()
    assert busy.limit == BATCH, "it may send at once"
    ledger.receive(busy, BATCH)
    assert ledger.release(busy, BATCH) == [busy]
    assert busy.limit == BATCH + 400


def test_connections_that_only_exist_leave_something_for_who_sends() -> None:
    ledger = CreditLedger(1000, 400, BATCH)
    opened = [ledger.open() for _ in range(1000)]
    assert ledger.outstanding_bytes <= 1000 - BATCH
    late = opened[-1]
    assert late.limit == 0
    assert ledger.ask(late, 10) == [late]
    assert late.limit - late.received >= 10


def test_who_waits_is_served_in_order_when_batches_have_left() -> None:
    ledger = CreditLedger(200, 400, BATCH)
    first, second, third = ledger.open(), ledger.open(), ledger.open()
    ledger.ask(second, BATCH)
    ledger.receive(first, BATCH)
    ledger.receive(second, BATCH)
    assert ledger.ask(third, BATCH) == []
    assert ledger.ask(first, BATCH) == []
    assert ledger.release(first, BATCH)[0] is third
    ledger.receive(third, BATCH)
    assert ledger.release(second, BATCH)[0] is first


def test_a_grant_that_is_not_used_goes_to_who_waits() -> None:
    ledger = CreditLedger(BATCH, 400, BATCH)
    idle, waiting = ledger.open(), ledger.open()
    ledger.ask(idle, BATCH)
    assert ledger.ask(waiting, BATCH) == []
    assert ledger.sweep() == [], "it has not had the time to use it"
    assert ledger.sweep() == [idle, waiting]
    assert (idle.limit, waiting.limit) == (0, BATCH)


def test_more_than_was_ever_granted_is_a_violation_and_what_was_taken_back_is_not() -> None:
    ledger = CreditLedger(1000, 400, BATCH)
    account = ledger.open()
    ledger.receive(account, BATCH)
    ledger.release(account, BATCH)
    assert account.limit == BATCH + 400
    ledger.lapse(account)
    assert account.limit == BATCH
    assert ledger.receive(account, 400), "it was on its way when it lapsed"
    assert not ledger.receive(account, 1)


def test_a_changed_budget_acts_on_grants_from_then_on() -> None:
    ledger = CreditLedger(1_000, 1_000, BATCH)
    busy, other = ledger.open(), ledger.open()
    assert ledger.receive(busy, BATCH)
    ledger.resize(BATCH)
    assert ledger.release(busy, BATCH) == [], "nothing is free of the smaller budget"
    assert ledger.outstanding_bytes <= 2 * BATCH
    ledger.lapse(other)
    late = ledger.open()
    ledger.lapse(busy)
    assert ledger.ask(late, BATCH) == [late]
    assert ledger.ask(busy, BATCH) == []
    assert ledger.resize(10 * BATCH) == [busy], "who waits is served from the larger one"
    assert busy.limit - busy.received >= BATCH
