"""Credits: the module's invariants under random use; everything within one budget however many
connections; order; what lapsed is debt.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netfront.quotas.quota_gate import GateClock, QuotaGate
from netfront.socket.flow_control import Credit, CreditLedger
from shm.quotas.quota_rules import Entity
from tests.kit.seeds import examples

BATCH = 100
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "send", "overdraw", "release", "ask", "close", "lapse", "sweep"]),
        st.integers(0, 29),
        st.integers(1, BATCH),
    ),
    max_size=300,
)


@settings(max_examples=examples(300), deadline=None)
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


@settings(max_examples=examples(100), deadline=None)
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


# ---- quotas --------------------------------------------------------------------------------------


def gate(rate: int) -> tuple[QuotaGate, GateClock]:
    clock = GateClock(0)
    return QuotaGate("producer_byte_rate", Entity("u"), rate, clock), clock


def resume(ledger: CreditLedger, of: QuotaGate, clock: GateClock, now_ns: int) -> list[Credit]:
    """Resume a gate as the quota service does when its timer has fired."""
    clock.now_ns = now_ns
    raised: list[Credit] = []
    for fired in clock.wheel.advance(now_ns):
        assert fired is of
        fired.begin()
        while (found := fired.next_item()) is not None:
            assert isinstance(found[0], Credit)
            raised += ledger.ask(found[0], found[0].requested)
        fired.end()
    return raised


def test_a_connection_at_its_quota_keeps_no_other_from_its_turn() -> None:
    ledger, (slow, clock) = CreditLedger(1_000, 400, BATCH), gate(10)
    limited, free = ledger.open(slow), ledger.open()
    assert limited.limit == 10, "as much as the rate gives in a second"
    assert ledger.ask(limited, BATCH) == []
    assert not ledger.is_contended, "it waits at its gate: nobody's credit is swept for it"
    assert ledger.ask(free, BATCH) == [free]
    assert ledger.receive(free, BATCH)
    assert ledger.release(free, BATCH) == [free]
    assert resume(ledger, slow, clock, 2_000_000_000) == [limited]
    assert limited.limit - limited.received >= BATCH, "a whole batch passes, however small the rate"


def test_connections_of_an_entity_share_its_rate_in_order() -> None:
    ledger, (slow, clock) = CreditLedger(10_000, 400, BATCH), gate(10)
    credits = [ledger.open(slow) for _ in range(5)]
    assert [credit.limit for credit in credits] == [10, 0, 0, 0, 0]
    for credit in credits[1:]:
        assert ledger.ask(credit, BATCH) == []
    served = []
    for second in range(1, 60):
        served += resume(ledger, slow, clock, second * 1_000_000_000)
    assert served == credits[1:]
    assert sum(credit.limit for credit in credits) <= 10 * 60 + BATCH


def test_a_waiting_connection_that_is_closed_or_freed_of_its_quota_leaves_nothing() -> None:
    ledger, (slow, clock) = CreditLedger(10_000, 400, BATCH), gate(10)
    first, second, third = (ledger.open(slow) for _ in range(3))
    assert ledger.ask(second, BATCH) == ledger.ask(third, BATCH) == []
    ledger.close(second)
    assert list(slow.waiting) == [third]
    assert ledger.use_gate(third, None) == [third]
    assert not slow.waiting
    assert clock.wheel.advance(10**12) == []
    assert first.gate is slow


@pytest.mark.parametrize(("asked_ms", "waited_ms"), [(0, 0), (45, 45), (10_000, 50)])
def test_a_wait_begins_with_the_last_batch_of_who_was_cut_short(
    asked_ms: int, waited_ms: int
) -> None:
    """It waits in its own process before it asks. One that had nothing to send did not wait."""
    ledger, (slow, clock) = CreditLedger(10_000, 400, BATCH), gate(BATCH + 20)
    clock.now_ns = 1_000_000
    credit = ledger.open(slow)
    assert ledger.receive(credit, BATCH)
    assert ledger.release(credit, BATCH) == [credit]
    assert credit.limit == BATCH + 20, "what the rate has left"
    clock.now_ns += asked_ms * 1_000_000
    granted = ledger.ask(credit, BATCH)
    told = [waited_ns // 1_000_000 for _, _, waited_ns in clock.over]
    if not asked_ms:
        assert granted == []
        assert list(slow.waiting.values()) == [clock.now_ns]
        return
    assert granted == [credit]
    assert told == [waited_ms]
    assert ledger.ask(credit, BATCH) == [credit]
    assert len(clock.over) == 1, "a wait is told once"


def test_a_wait_at_the_gate_has_the_time_before_the_question() -> None:
    ledger, (slow, clock) = CreditLedger(10_000, 400, BATCH), gate(BATCH + 20)
    clock.now_ns = 1_000_000
    credit = ledger.open(slow)
    assert ledger.receive(credit, BATCH)
    ledger.release(credit, BATCH)
    slow.take(50)
    clock.now_ns += 30_000_000
    assert ledger.ask(credit, BATCH) == []
    assert list(slow.waiting.values()) == [1_000_000]
    assert clock.over == []


def test_credit_that_was_not_used_is_given_back_to_the_rate() -> None:
    ledger, (slow, _) = CreditLedger(10_000, 400, BATCH), gate(1_000)
    for _ in range(1_000):  # reconnects
        credit = ledger.open(slow)
        assert credit.limit == BATCH
        ledger.close(credit)
    assert slow.bucket.balance(0) == 1_000
    credit = ledger.open(slow)
    assert ledger.receive(credit, 60)
    ledger.close(credit)
    assert slow.bucket.balance(0) == 940


@settings(max_examples=examples(300), deadline=None)
@given(STEPS, st.integers(100, 1000), st.integers(1, 500))
def test_what_is_granted_never_exceeds_the_rate_whatever_connections_do(
    steps: list[tuple[str, int, int]], budget: int, rate: int
) -> None:
    ledger, (slow, clock) = CreditLedger(budget, 400, BATCH), gate(rate)
    open_now: list[Credit] = []
    under_way: dict[Credit, list[int]] = {}
    received = debts = 0
    for turn, (step, number, size) in enumerate(steps):
        now_ns = turn * 50_000_000
        resume(ledger, slow, clock, now_ns)
        if step == "open":
            open_now.append(ledger.open(slow if number % 3 else None))
            under_way[open_now[-1]] = []
        elif step == "sweep":
            ledger.sweep()
        elif open_now:
            credit = open_now[number % len(open_now)]
            queue = under_way[credit]
            if step == "send" and credit.limit - credit.received >= size:
                assert ledger.receive(credit, size)
                queue.append(size)
                received += size if credit.gate is not None else 0
            elif step == "overdraw" and credit.granted - credit.received >= size:
                if credit.gate is not None:
                    debts += size
                if ledger.receive(credit, size):
                    queue.append(size)
                else:
                    ledger.release(credit, size)
            elif step == "release" and queue:
                ledger.release(credit, queue.pop(0))
            elif step == "ask":
                ledger.ask(credit, size)
            elif step == "lapse":
                ledger.lapse(credit)
            elif step == "close":
                open_now.remove(credit)
                del under_way[credit]
                ledger.close(credit)
        assert received <= rate * (now_ns / 1e9 + 1) + BATCH + 1, (turn, debts)
        assert ledger.outstanding_bytes == sum(a.limit - a.released for a in open_now)
        assert not set(slow.waiting) & set(ledger._waiting)
        assert all(credit in open_now for credit in slow.waiting)
        assert not slow.waiting or slow._timer is not None
