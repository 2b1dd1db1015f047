"""Passwords are checked beside the loop, in bounds, and each right one once."""

from __future__ import annotations

import threading

from netfront.kafka.exchange.waiter import Waiter
from netfront.kafka.login.password_checks import WAITING_OF_HOST_MAX, PasswordChecks
from tests.kit.processes import wait_until


class Bench:
    """Checks whose hashes are the passwords themselves, behind a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: list[str] = []
        self.rung = threading.Semaphore(0)
        self.checks = PasswordChecks(self.rung.release, self.check)

    def check(self, password: str, stored: str) -> bool:
        self.gate.wait()
        self.asked.append(password)
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
    assert bench.result(bench.checks.check("right", "right", "h")) is True
    known = bench.checks.check("right", "right", "h")
    assert (known.is_done, known.value) == (True, True)
    for password, stored in (("wrong", "right"), ("right", ""), ("broken", "right")):
        for _ in range(2):
            waiter = bench.checks.check(password, stored, "h")
            assert not waiter.is_done
            assert bench.result(waiter) is False
    assert len(bench.asked) == 7
    assert bench.rung.acquire(blocking=False), "the loop was woken"


def test_one_host_cannot_take_all_places() -> None:
    bench = Bench()
    waiters = [bench.checks.check("x", "y", "flood") for _ in range(WAITING_OF_HOST_MAX)]
    beyond = bench.checks.check("x", "y", "flood")
    assert (beyond.is_done, beyond.value) == (True, None)
    other = bench.checks.check("y", "y", "other")
    assert not other.is_done
    bench.gate.set()
    assert bench.result(other) is True
    assert [bench.result(waiter) for waiter in waiters] == [False] * WAITING_OF_HOST_MAX
    assert bench.result(bench.checks.check("x", "y", "flood")) is False
