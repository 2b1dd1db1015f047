"""A caller that waits while another thread's run of the sender goes on."""

from __future__ import annotations

import threading

from tailrace import Producer
from tailrace.core.errors import TailraceError
from tests.kit.processes import HANG_LIMIT_S


def test_a_run_of_another_thread_is_not_taken_for_an_interrupted_one() -> None:
    producer = Producer("tcp://127.0.0.1:1")
    sender_thread = producer._sender_thread
    is_running, may_end = threading.Event(), threading.Event()
    errors: list[TailraceError] = []

    def run() -> None:
        with sender_thread.lock:
            sender_thread._is_running_once = True
            is_running.set()
            may_end.wait(HANG_LIMIT_S)
            sender_thread._is_running_once = False

    def wait() -> None:
        try:
            sender_thread.check_may_wait()
        except TailraceError as error:
            errors.append(error)

    runner = threading.Thread(target=run)
    runner.start()
    assert is_running.wait(HANG_LIMIT_S)
    waiter = threading.Thread(target=wait)
    waiter.start()
    may_end.set()
    for thread in (runner, waiter):
        thread.join(HANG_LIMIT_S)
    producer.close(timeout=0)
    assert errors == []
