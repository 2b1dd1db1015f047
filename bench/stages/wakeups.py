"""Threads that one acknowledgement wakes: `make bench-wakeups` counts, for each thread and ack,
sleeps, CPU time, who wakes whom, and system calls.

A client sends one record of 100 bytes after the other and waits for each ack: every 2 ms (cold
caches, all asleep) and without a pause. Counts come from /proc (`schedstat`, `status`); who wakes
whom from `perf` (which loses some events on a very busy machine), system calls from `strace`, where
these are there and may be used. Counts hold on a busy machine too; what they take in microseconds
does not.

`python -P -m bench.stages.wakeups [--count N] [--syscalls] [ACKS TRANSPORT GAP_US]...`, such as `1
tcp 2000`.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from bench.measure import machine, percentile
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded

CASES = [
    (acks, transport, gap)
    for acks in ("1", "all")
    for transport in ("tcp", "ipc")
    for gap in (2000, 0)
]
WARM_UP = 200
_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)
_WAKING = re.compile(r"^\s*(.+?)\s+(\d+)\s+[\d.]+:\s+sched:sched_waking: comm=.+ pid=(\d+) ")
_CALL = re.compile(r"^(\d+)\s+(?:[\d:.]+\s+)?(?:<\.\.\. )?(\w+)(?:\(| resumed)")


@dataclass(slots=True)
class Thread:
    """Counts of one thread in a run."""

    name: str
    cpu_us: float = 0.0
    switches: int = 0
    wakes: collections.Counter[str] = field(default_factory=collections.Counter)
    """Whom it woke -> how often."""
    calls: collections.Counter[str] = field(default_factory=collections.Counter)


def threads_of(pids: list[int]) -> dict[int, Thread]:
    """Every thread of these processes, with its counters so far."""
    found = {}
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{name}/schedstat", encoding="ascii") as file:
                    cpu_us = int(file.read().split()[0]) / 1000
                with open(f"/proc/{pid}/task/{name}/status", encoding="ascii") as file:
                    switches = sum(map(int, _SWITCHES.findall(file.read())))
            except FileNotFoundError:
                continue  # it has ended
            found[int(name)] = Thread(_thread_name(pid, int(name)), cpu_us, switches)
    return found


def _thread_name(pid: int, thread: int) -> str:
    with open(f"/proc/{pid}/comm", encoding="ascii") as file:
        process = file.read().strip().removeprefix("tr-")
    with open(f"/proc/{pid}/task/{thread}/comm", encoding="ascii") as file:
        own = file.read().strip()
    process = "client" if process.startswith("python") else re.sub(r"-\d+$", "", process)
    if pid == thread:
        return process
    return (
        f"{process}'s I/O thread"
        if "/IO/" in own
        else f"{process}'s {own.split('/')[0] if own.startswith('ZMQ') else 'helper'}"
    )


class Client:
    """A process that sends one record at a time and waits for its ack."""

    def __init__(self, address: str, acks: str, gap_us: int) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "bench.stages.wakeups",
            "--client",
            address,
            acks,
            str(gap_us),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the client has ended")
        return line

    def run(self, count: int) -> tuple[float, float]:
        """Send so many; returns (p50, p99) in microseconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        middle, high = self._line().split()
        return float(middle), float(high)

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def client(address: str, acks: str, gap_us: int) -> None:
    """The client's process: reads how many to send, line by line."""
    value = b"x" * 100
    with Producer(address, acks=1 if acks == "1" else "all", linger_ms=0) as producer:
        producer.send("wakes", value, partition=0).result(30)
        print("ready", flush=True)
        for line in sys.stdin:
            times = []
            for _ in range(int(line)):
                begun = time.perf_counter_ns()
                producer.send("wakes", value, partition=0).result(30)
                ended = time.perf_counter_ns()
                times.append((ended - begun) / 1000)
                if gap_us:
                    time.sleep(gap_us / 1e6)
            print(statistics.median(times), percentile(times, 0.99), flush=True)


def measure(
    address: str, pids: list[int], acks: str, gap_us: int, count: int, calls: bool
) -> tuple[list[Thread], float, float]:
    """One case; returns what each thread did in all `count` acks, and the latency's (p50, p99) in
    microseconds (without tracers).
    """
    sender = Client(address, acks, gap_us)
    try:
        pids = [*pids, sender.process.pid]
        sender.run(WARM_UP)
        before = threads_of(pids)
        middle, high = sender.run(count)
        found = threads_of(pids)
        for number, thread in found.items():
            if number in before:
                thread.cpu_us -= before[number].cpu_us
                thread.switches -= before[number].switches
        with tempfile.TemporaryDirectory(prefix="tailrace-wakeups-") as directory:
            _note_wakes(found, f"{directory}/sched", lambda: sender.run(count))
            if calls:
                _note_calls(found, pids, f"{directory}/calls", lambda: sender.run(count))
    finally:
        sender.close()
    return list(found.values()), middle, high


def _note_wakes(found: dict[int, Thread], path: str, run: Callable[[], object]) -> None:
    """By `perf sched`; nothing where it is not there, or may not."""
    if shutil.which("perf") is None:
        return
    recorder = subprocess.Popen(
        ["perf", "record", "-q", "-a", "-e", "sched:sched_waking", "-o", path],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(0.5)
    if recorder.poll() is not None:
        return
    run()
    recorder.send_signal(signal.SIGINT)
    recorder.wait(30)
    shown = subprocess.run(
        ["perf", "script", "-i", path, "-F", "comm,tid,time,event,trace"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    for line in shown.stdout.splitlines():
        match = _WAKING.match(line)
        if match is None or int(match[3]) not in found:
            continue
        waker = found.get(int(match[2]))
        if waker is not None:
            waker.wakes[found[int(match[3])].name] += 1
        else:
            found.setdefault(0, Thread("the kernel, timers")).wakes[found[int(match[3])].name] += 1


def _note_calls(
    found: dict[int, Thread], pids: list[int], path: str, run: Callable[[], object]
) -> None:
    """By `strace`, which makes everything slower: what depends on time (a process that is still
    awake) counts a little otherwise.
    """
    if shutil.which("strace") is None:
        return
    tracer = subprocess.Popen(
        ["strace", "-f", "-q", "-o", path, *(word for pid in pids for word in ("-p", str(pid)))],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(1.0)
    if tracer.poll() is not None:
        return
    run()
    tracer.send_signal(signal.SIGINT)
    tracer.wait(30)
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            match = _CALL.match(line)
            if match is not None and int(match[1]) in found and " resumed" not in line:
                found[int(match[1])].calls[match[2]] += 1


def show(threads: list[Thread], count: int) -> None:
    """A line for each thread that did something for the acks."""
    for thread in sorted(threads, key=lambda t: (not t.name.startswith("client"), -t.switches)):
        if thread.switches + sum(thread.wakes.values()) < count / 20:
            continue
        wakes = ", ".join(
            f"{name} {number / count:.2f}"
            for name, number in thread.wakes.most_common()
            if number >= count / 50
        )
        print(
            f"  {thread.name:<26} {thread.switches / count:>7.2f} {thread.cpu_us / count:>8.0f}   "
            f"{wakes}"
        )
        if thread.calls:
            shown = ", ".join(
                f"{name} {number / count:.2f}"
                for name, number in thread.calls.most_common()
                if number >= count / 50
            )
            print(f"  {'':<26} {'':>16}   calls {sum(thread.calls.values()) / count:.1f}: {shown}")
    total = sum(t.switches for t in threads), sum(t.cpu_us for t in threads)
    print(f"  {'together':<26} {total[0] / count:>7.2f} {total[1] / count:>8.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.stages.wakeups")
    parser.add_argument("cases", nargs="*", metavar="ACKS TRANSPORT GAP_US")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--syscalls", action="store_true")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    if given.client:
        client(given.cases[0], given.cases[1], int(given.cases[2]))
        return 0
    words = given.cases
    cases = [(words[i], words[i + 1], int(words[i + 2])) for i in range(0, len(words), 3)] or CASES
    where = machine()
    print(
        f"Wake-ups of an ack on {where['cpu']}, {where['cores']} cores, commit {where['commit']}; "
        f"per ack, {given.count} acks"
    )
    with tempfile.TemporaryDirectory(
        prefix="tailrace-wakeups-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        settings = dict(item.split("=", 1) for item in given.set)
        listen = ["tcp://127.0.0.1:0", f"ipc://{directory}/socket"]
        running = start_embedded(
            data_dir=f"{directory}/data", listen=listen, settings=settings, auto_create_topics=False
        )
        try:
            with Admin(running.address) as admin:
                admin.create_topics([NewTopic("wakes")])
            pids = [child.pid for child in psutil.Process(running.pid).children()]
            for acks, transport, gap_us in cases:
                address = running.address if transport == "tcp" else listen[1]
                threads, middle, high = measure(
                    address, pids, acks, gap_us, given.count, given.syscalls
                )
                pace = f"every {gap_us} us" if gap_us else "without a pause"
                print(
                    f"\nacks={acks}, {transport}, {pace}: p50 {middle:.0f} us, p99 {high:.0f} us\n "
                    f" {'':<26} {'sleeps':>7} {'CPU us':>8}   wakes"
                )
                show(threads, given.count)
        finally:
            running.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
