"""Sweeps over connections pause while libzmq's threads do nothing; the first byte resumes them."""

from __future__ import annotations

import os
import threading
import time

import pytest

from netfront.socket.io_thread_slice import io_threads
from netfront.socket.peers.connection_costs import SWEEP_PEERS
from netfront.socket.peers.connections import SWEEP_INTERVAL_NS, Limits
from netfront.socket.peers.sweep_pause import SweepPause, cpu_clock
from netfront.socket.router import Router
from shm.queues.doorbell import Doorbell
from shm.runtime.timing_wheel import NEVER_NS
from tests.kit.peers.raw_zmtp import RawPeer, frame
from tests.kit.processes import wait_until

MIB = 1 << 20
LIMITS = Limits(
    connections_max=10, unshaken_peer_max=MIB, unshaken_max=2 * MIB, untaken_max=8 * MIB,
    unsent_max=64 * MIB, memory_growth_max=512 * MIB,
)  # fmt: skip


class Host:
    """A clock that a sleep advances, and I/O threads that work when they are told to."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.cpu_ns = 0
        self.sleeps = 0
        self.works_at_ns = NEVER_NS
        self.ready_at_ns = NEVER_NS
        self.pause = SweepPause(lambda: self.cpu_ns, lambda: self.now_ns)

    def poll(self, timeout_ms: float | None = None, /) -> list[tuple[int, int]]:
        assert timeout_ms is not None
        self.sleeps += 1
        until_ns = self.now_ns + int(timeout_ms * 1_000_000)
        self.now_ns = min(until_ns, max(self.now_ns, self.ready_at_ns))
        if self.now_ns >= self.works_at_ns:
            self.cpu_ns += 1
            self.works_at_ns = NEVER_NS
        return [(7, 1)] if self.now_ns >= self.ready_at_ns else []

    def sweep(self, peer_count: int = 1, is_settled: bool = True) -> None:
        self.pause.begin_sweep()
        self.pause.end_sweep(self.now_ns, peer_count, is_settled)


def test_sweeps_pause_after_an_idle_round_and_a_sleep_keeps_its_deadline() -> None:
    host = Host()
    paused = []
    for _ in range(2):
        host.sweep()
        paused.append(host.pause.is_paused)
    assert paused == [False, True], "the threads have worked before the first sweep"
    assert host.pause.sleep(host, 1_000, 0) == ([], False)
    assert host.now_ns == 1_000_000_000
    assert host.sleeps == 1_000_000_000 // SWEEP_INTERVAL_NS


def test_the_first_work_of_an_io_thread_makes_a_sweep_due_within_one_interval() -> None:
    host = Host()
    host.sweep()
    host.sweep()
    host.works_at_ns = 10 * SWEEP_INTERVAL_NS + 1
    assert host.pause.sleep(host, None, 0) == ([], True)
    assert host.now_ns <= 11 * SWEEP_INTERVAL_NS
    assert not host.pause.is_paused


def test_rings_that_come_faster_than_the_interval_do_not_postpone_the_check() -> None:
    host = Host()
    host.sweep()
    host.sweep()
    host.works_at_ns = 1
    for _ in range(1_000):
        host.ready_at_ns = host.now_ns + 1_000_000
        found, is_due = host.pause.sleep(host, None, 0)
        assert found
        if is_due:
            break
    assert host.now_ns <= SWEEP_INTERVAL_NS + 1_000_000


def test_what_is_left_to_check_and_unchecked_peers_keep_the_sweeps() -> None:
    host = Host()
    host.sweep()
    for _ in range(3):
        host.sweep(is_settled=False)
        assert not host.pause.is_paused
    host.cpu_ns += 1
    for _ in range(3):
        host.sweep(peer_count=3 * SWEEP_PEERS - 1)
        assert not host.pause.is_paused, "a part of the round has yet to be checked"
    host.sweep(peer_count=3 * SWEEP_PEERS - 1)
    assert host.pause.is_paused


def test_a_thread_that_is_found_late_is_not_taken_for_an_idle_one() -> None:
    """libzmq's thread has no name before it first runs: on a busy machine, after the first look."""
    found: list[int] = []
    cpu_ns = cpu_clock(lambda: found)
    assert cpu_ns() == 0
    found.append(threading.get_native_id())
    first_ns = cpu_ns()
    assert first_ns > 0
    found.clear()
    assert cpu_ns() >= first_ns, "a thread once found is not looked for again"


def test_a_message_that_does_not_end_wakes_a_front_whose_sweeps_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No descriptor of the front reports its bytes: libzmq's thread takes them all."""
    # A front is alone in its process; here, threads of other tests' clients may work all the time.
    others = {int(thread) for thread in os.listdir("/proc/self/task")}
    monkeypatch.setattr(
        "netfront.socket.router.io_threads", lambda: sorted({*io_threads()} - others)
    )
    router = Router(["tcp://127.0.0.1:*"], MIB, LIMITS)
    bell = Doorbell.create()
    peer = RawPeer(f"tcp://127.0.0.1:{router.port}")
    try:
        peer.shake_zmtp()

        def watch() -> int:
            router.wait(bell, 1, 0)
            now_ns = time.monotonic_ns()
            if now_ns >= router.watch_at_ns:
                router.watch(now_ns)
            return router.watch_at_ns

        wait_until(lambda: watch() != NEVER_NS, "the connection is known")
        wait_until(lambda: watch() == NEVER_NS, "the sweeps pause")
        assert peer.send(frame(b"x" * 4096, more=True))
        while router.watch_at_ns:  # a descriptor may wake it before
            router.wait(bell, None, 0)
    finally:
        peer.close()
        router.close()


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_wait_that_is_not_paused_is_one_sleep(is_settled: bool) -> None:
    host = Host()
    host.sweep(is_settled=is_settled)
    assert host.pause.sleep(host, 400, 0) == ([], False)
    assert host.sleeps == 1
