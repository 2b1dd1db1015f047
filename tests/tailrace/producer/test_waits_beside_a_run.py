"""A caller that waits while another thread's run of the sender goes on."""

from __future__ import annotations

import os
import threading

import pytest

from tailrace import Producer
from tailrace.core.errors import TailraceError
from tailrace.producer.sending.sender_thread import SenderThread
from tests.kit.processes import HANG_LIMIT_S

ANOTHER_THREAD = 1
"""No thread's identity: an address."""


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


def is_woken(sender_thread: SenderThread) -> bool:
    try:
        return os.eventfd_read(sender_thread._driver_fd) > 0
    except BlockingIOError:
        return False


@pytest.mark.parametrize("received", [0, 1])
def test_a_request_of_another_thread_wakes_the_one_that_waits_if_it_received_something(
    received: int,
) -> None:
    producer = Producer("tcp://127.0.0.1:1")
    sender_thread = producer._sender_thread
    connection = sender_thread.connection

    def use() -> None:
        connection.received_count += received

    with sender_thread.lock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(connection), "is_ready", True)
        sender_thread._driver = ANOTHER_THREAD
        sender_thread.use_connection(use)
        assert is_woken(sender_thread) == bool(received)
        patch.setattr(type(connection), "is_ready", False)
        sender_thread.use_connection(use)
        assert is_woken(sender_thread), "its descriptor is of a socket that is gone"
        sender_thread._driver = 0
    producer.close(timeout=0)


def test_a_thread_that_did_not_wait_for_a_response_leaves_the_wake_up_of_another() -> None:
    producer = Producer("tcp://127.0.0.1:1")
    sender_thread = producer._sender_thread
    with sender_thread.lock:
        sender_thread._driver = ANOTHER_THREAD
        sender_thread._wake_driver()
        sender_thread.sleep_until(0)
        assert is_woken(sender_thread)
        sender_thread._wake_driver()
        sender_thread._driver = 0
        sender_thread.sleep_until(0)
        assert not is_woken(sender_thread)
    producer.close(timeout=0)
