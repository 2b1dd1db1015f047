"""Passwords are checked beside the loop, hosts in turn, and each right one once."""

from __future__ import annotations

import threading

from netfront.kafka.exchange.waiter import Waiter
from netfront.kafka.login.password_checks import PasswordChecks
from tests.kit.processes import wait_until


class Bench:
    """Checks whose hashes are the passwords themselves, behind a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: list[str] = []
        self.rung = threading.Semaphore(0)
        self.checks = PasswordChecks(self.rung.release, self.check)

    def check(self, password: str, stored: str) -> bool:
        self.asked.append(password)
        self.gate.wait()
        if password == "broken":
            raise MemoryError
        return bool(stored) and password == stored

    def result(self, waiter: Waiter) -> object:
        def is_done() -> bool:
            self.checks.step()
            return waiter.is_done

        wait_until(is_done, "the check is done")
        return waiter.value


def test_a_password_is_checked_once_while_it_is_right() -> None:
    bench = Bench()
    bench.gate.set()
    assert bench.result(bench.checks.check("shop", "right", "right", "h")) is True
    known = bench.checks.check("shop", "right", "right", "h")
    assert (known.is_done, known.value) == (True, True)
    for password, stored in (("wrong", "right"), ("right", ""), ("broken", "right")):
        for _ in range(2):
            waiter = bench.checks.check("shop", password, stored, "h")
            assert not waiter.is_done
            assert bench.result(waiter) is False
    assert len(bench.asked) == 7
    assert bench.rung.acquire(blocking=False), "the loop was woken"


def test_hosts_take_turns_and_none_is_refused() -> None:
    bench = Bench()
    flood = [bench.checks.check("shop", f"x{n}", "y", "flood") for n in range(60)]
    others = [bench.checks.check("shop", f"z{n}", "y", "other") for n in range(2)]
    assert not any(waiter.is_done for waiter in flood + others)
    bench.gate.set()
    assert [bench.result(waiter) for waiter in others] == [False, False]
    assert [name for name in bench.asked if name[0] == "z"] == ["z0", "z1"]
    assert bench.asked[:5] in (
        ["x0", "x1", "z0", "x2", "z1"], ["x0", "z0", "x1", "z1", "x2"]
    )  # fmt: skip
    assert [bench.result(waiter) for waiter in flood] == [False] * 60


def test_equal_passwords_of_a_user_are_checked_once_while_they_wait() -> None:
    bench = Bench()
    first = bench.checks.check("shop", "first", "right", "h")
    equal = [bench.checks.check("shop", "right", "right", "h") for _ in range(5)]
    away = [bench.checks.check("shop", "right", "right", "other") for _ in range(5)]
    unknown = [bench.checks.check(name, "x", "", "h") for name in ("a", "b", "a")]
    joined = bench.checks.check("shop", "first", "right", "h")
    bench.gate.set()
    assert [bench.result(waiter) for waiter in (first, joined)] == [False, False]
    assert [bench.result(waiter) for waiter in equal + away] == [True] * 10
    assert [bench.result(waiter) for waiter in unknown] == [False] * 3
    assert sorted(bench.asked) == ["first", "right", "x", "x"]


def test_a_check_that_nobody_waits_for_does_not_begin() -> None:
    bench = Bench()
    running = bench.checks.check("shop", "running", "y", "h")
    gone = [bench.checks.check("shop", "gone", "y", "h") for _ in range(2)]
    half = [bench.checks.check("shop", "half", "y", "h") for _ in range(2)]
    alone = bench.checks.check("shop", "alone", "y", "other")
    for waiter in (*gone, half[0], alone, running):
        bench.checks.forget(waiter)
        bench.checks.forget(waiter)
    bench.gate.set()
    assert bench.result(half[1]) is False
    assert bench.asked == ["running", "half"]
    assert not any(waiter.is_done for waiter in (*gone, half[0], alone, running))
