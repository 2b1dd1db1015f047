"""Breadth: one producer to many partitions and topics, 100 producers at once, 10,000 connections
that say nothing. A part of `make bench-scale`; alone `python -P -m bench.stages.breadth [width]
[producers] [connections]`.

What bounds the connections is said: the appliance's `connections.max`, its limit of open files
(each connection is one), ours (likewise), or what the appliance answered.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.at_rest.footprint import idle_percent, processes
from bench.at_rest.idle_connections import OTHER_DESCRIPTORS
from bench.measure import RESULTS, machine, percentile, private_memory_mb
from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.core.errors import TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

SECONDS = float(os.environ.get("SECONDS", "2"))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
PRODUCERS = int(os.environ.get("PRODUCERS", "100"))
RECORDS_EACH = int(os.environ.get("RECORDS_EACH", "10000"))
PROCESSES = 10
CONNECTIONS = int(os.environ.get("CONNECTIONS", "10000"))
CONNECTIONS_MAX = 16_384
"""The appliance's default of connections.max."""
FOR_OTHERS = 16
"""Connections left for who measures beside."""
APPLIANCE_DESCRIPTORS = 1_600
"""Open files that a front keeps of its limit for the log's files and itself, about."""
HELD_BY_PROCESS = 5_000
LATENCIES = 500
SETTLE_S, IDLE_S = 12.0, 10.0
"""After SETTLE_S the last segments' ages and credits have been looked at."""
WITHIN = 0.9
_CONTEXT = multiprocessing.get_context("spawn")


@contextmanager
def appliance(**settings: Any) -> Iterator[EmbeddedAppliance]:
    with tempfile.TemporaryDirectory(
        prefix="tailrace-breadth-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        running = start_embedded(
            data_dir=f"{directory}/data",
            settings={"ring_bytes": 64 << 20, **settings},
            auto_create_topics=False,
        )
        try:
            yield running
        finally:
            running.stop()


def in_process(function: Any, *arguments: Any) -> Any:
    """The function's result, from a process of its own. Raises RuntimeError when it ends without
    one.
    """
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    child = _CONTEXT.Process(target=_answer, args=(theirs, function, arguments))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__} ended without a result") from None
    finally:
        child.join()


def _answer(connection: Any, function: Any, arguments: tuple[Any, ...]) -> None:
    connection.send(function(*arguments))


# ---- one producer, many partitions ---------------------------------------------------------------


def _send(address: str, topics: Sequence[str], partitions: int, seconds: float) -> float:
    """Records a second of `send()` with a key, acks=1, the topics in turn."""
    payload, keys = b"x" * 100, [b"k%d" % number for number in range(1024)]
    with Producer(address, acks=1) as producer:
        for topic in topics:
            for partition in range(partitions):
                producer.send(topic, payload, partition=partition)
        producer.flush()
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            for number in range(1024):
                producer.send(topics[number % len(topics)], payload, keys[number])
            count += 1024
        producer.flush()
        rate = count / (time.perf_counter() - begun)
        if errors := producer.metrics()["errors"]:
            raise RuntimeError(f"{errors} records were not acknowledged")
        return rate


def width() -> list[dict[str, Any]]:
    """One partition, 64 of a topic, 200 topics, in turn; and what the appliance costs with all of
    them idle.
    """
    targets = {
        "one partition": (["one"], 1),
        "64 partitions of a topic": (["wide"], 64),
        "200 topics": ([f"topic-{n}" for n in range(200)], 1),
    }
    rates: dict[str, list[float]] = {name: [] for name in targets}
    with appliance() as running:
        with Admin(running.address) as admin:
            admin.create_topics(
                [
                    NewTopic(name, partitions)
                    for names, partitions in targets.values()
                    for name in names
                ]
            )
        for names, partitions in targets.values():
            in_process(_send, running.address, names, partitions, 0.2)  # first segments are made
        for number in range(ROUNDS):
            for position in range(len(targets)):
                name = list(targets)[(position + number) % len(targets)]
                rates[name].append(in_process(_send, running.address, *targets[name], SECONDS))
        time.sleep(SETTLE_S)
        idle = idle_percent(processes(running.pid), IDLE_S)
    print(
        f"\n{'ONE PRODUCER TO':<34}{'RECORDS/S':>12}{'LEAST':>12}{'MOST':>12}{'OF ONE':>8}{'GOAL':>8}{'MET':>6}"  # noqa: E501
    )
    rows: list[dict[str, Any]] = []
    for name, found in rates.items():
        of_one = statistics.median(found) / statistics.median(rates["one partition"])
        goal = "" if name == "one partition" else f"{WITHIN:.2f}"
        met = "" if not goal else "yes" if of_one >= WITHIN else "no"
        print(
            f"{name:<34}{statistics.median(found):>12,.0f}{min(found):>12,.0f}{max(found):>12,.0f}{of_one:>8.2f}{goal:>8}{met:>6}"
        )
        rows.append(
            {"name": name, "rates": found, "of_one": of_one, "goal": goal and WITHIN, "met": met}
        )
    print(f"idle, with all of them: {idle:.2f} % of a core")
    return [*rows, {"name": "idle", "percent_of_a_core": idle}]


# ---- many producers at once ----------------------------------------------------------------------


def _producers(address: str, topic: str, count: int, each: int, barrier: Any, results: Any) -> None:
    """`count` producers in this process, a thread each; one that fails is told of, and keeps its
    process from sending.
    """
    payload = b"x" * 100
    found: list[tuple[float, int]] = []
    failures: list[str] = []

    def one(number: int) -> None:
        try:
            with Producer(address, acks="all") as producer:
                producer.send(topic, payload, b"first").result(60)
                inner.wait(120)
                inner.wait(120)
                begun = time.perf_counter()
                handles = [
                    producer.send(topic, payload, b"%d-%d" % (number, record & 63))
                    for record in range(each)
                ]
                producer.flush(120)
                seconds = time.perf_counter() - begun
                found.append(
                    (
                        seconds,
                        sum(handle.done() and handle.exception(0) is None for handle in handles),
                    )
                )
        except TailraceError as error:
            failures.append(str(error))
            inner.abort()
        except threading.BrokenBarrierError:
            pass  # another has failed, and is told of

    inner = threading.Barrier(count + 1)
    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        inner.wait(120)
    barrier.wait(150)
    begun = time.perf_counter()
    with contextlib.suppress(threading.BrokenBarrierError):
        inner.wait(120)
    for thread in threads:
        thread.join()
    results.put((begun, time.perf_counter(), found, failures))


def producers_at_once() -> dict[str, Any]:
    """All of them send RECORDS_EACH records with acks=all to a topic of 4 partitions."""
    processes_count = min(PROCESSES, PRODUCERS)
    counts = [
        PRODUCERS // processes_count + (number < PRODUCERS % processes_count)
        for number in range(processes_count)
    ]
    with appliance() as running:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("many", 4)])
        pids = processes(running.pid)
        before = private_memory_mb(pids)
        barrier, results = _CONTEXT.Barrier(processes_count + 1), _CONTEXT.Queue()
        children = [
            _CONTEXT.Process(
                target=_producers,
                args=(running.address, "many", count, RECORDS_EACH, barrier, results),
            )
            for count in counts
        ]
        for child in children:
            child.start()
        barrier.wait(150)
        connected = private_memory_mb(pids)
        found = [results.get(timeout=300) for _ in children]
        after = private_memory_mb(pids)
        for child in children:
            child.join()
        with Admin(running.address) as admin:
            ends = admin.offsets(
                {TopicPartition("many", partition): "latest" for partition in range(4)}
            )
    seconds = max(item[1] for item in found) - min(item[0] for item in found)
    each = [one for item in found for one in item[2]] or [(seconds, 0)]
    failures = [failure for item in found for failure in item[3]]
    acknowledged, stored = sum(one[1] for one in each), sum(end["offset"] for end in ends.values())
    for failure in failures[:3]:
        print(f"one of {len(failures)} producers that failed: {failure}")
    row = {
        "name": f"{PRODUCERS} producers at once, acks=all", "records": PRODUCERS * RECORDS_EACH,
        "acknowledged": acknowledged,
        "stored": stored,
        "all_once": acknowledged == PRODUCERS * RECORDS_EACH and stored == acknowledged + PRODUCERS,
        "records_per_s": acknowledged / seconds,
        "slowest_producer_records_per_s": RECORDS_EACH / max(one[0] for one in each),
        "failures": failures,
        "fastest_producer_records_per_s": RECORDS_EACH / min(one[0] for one in each),
        "pss_mb_before_connected_after": [before[0], connected[0], after[0]],
    }  # fmt: skip
    once = "each once in the log" if row["all_once"] else f"NOT all once: {stored:,} in the log"
    print(
        f"\n{row['name']}: {acknowledged:,} of {row['records']:,} records acknowledged, {once}; "
        f"{acknowledged / seconds:,.0f} records/s together, "
        f"a producer {RECORDS_EACH / max(one[0] for one in each):,.0f} .. "
        f"{RECORDS_EACH / min(one[0] for one in each):,.0f}; "
        f"PSS of the appliance {before[0]:.0f} MB, connected {connected[0]:.0f}, after "
        f"{after[0]:.0f}"
    )
    return row


# ---- connections that say nothing ----------------------------------------------------------------


def latencies(address: str, topic: str) -> list[float]:
    """Microseconds until one record of 100 B is acknowledged, acks=1."""
    found = []
    with Producer(address, acks=1, linger_ms=0) as producer:
        for number in range(LATENCIES + 100):
            begun = time.perf_counter()
            producer.send(topic, b"x" * 100).result(30)
            if number >= 100:
                found.append((time.perf_counter() - begun) * 1e6)
    return found


def bounded_count(wanted: int, hard_limit: int) -> tuple[int, str]:
    """(how many connections the appliance can be asked for, what bounds them)."""
    by_files = max(1, hard_limit - APPLIANCE_DESCRIPTORS)
    return min(
        (wanted, "what was asked for"),
        (CONNECTIONS_MAX - FOR_OTHERS, "connections.max"),
        (by_files, f"the appliance's limit of {hard_limit:,} open files"),
    )


def connections() -> dict[str, Any]:
    """Cost of each connection, and of all for the one producer beside them."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count, bound = bounded_count(CONNECTIONS, hard)
    by_process = min(HELD_BY_PROCESS, hard - OTHER_DESCRIPTORS)
    with appliance() as running:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("beside")])
        pids = processes(running.pid)
        alone = in_process(latencies, running.address, "beside")
        memory_before, idle_before = private_memory_mb(pids)[0], idle_percent(pids, IDLE_S)
        begun = time.perf_counter()
        holders = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "bench.at_rest.idle_connections", running.address,
                str(min(by_process, count - first))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for first in range(0, count, by_process)
        ]  # fmt: skip
        opened, reasons = 0, []
        for holder in holders:
            _, number, *reason = (holder.stdout.readline() if holder.stdout else "").split()
            opened += int(number)
            reasons += [" ".join(reason)] if reason else []
        seconds = time.perf_counter() - begun
        time.sleep(SETTLE_S)
        memory_after, idle_after = private_memory_mb(pids)[0], idle_percent(pids, IDLE_S)
        beside = in_process(latencies, running.address, "beside")
        closed = sum(int(holder.communicate("")[0].split()[1]) for holder in holders)
    each_kb = (memory_after - memory_before) * 1000 / max(1, opened)
    bounded_by = reasons[0] if reasons else bound
    p50, p99 = ([percentile(alone, share), percentile(beside, share)] for share in (0.5, 0.99))
    print(
        f"\n{opened:,} connections that say nothing (bounded by {bounded_by}), opened in "
        f"{seconds:.0f} s, {closed} closed by the appliance: "
        f"{each_kb:.1f} kB each; idle CPU {idle_before:.2f} % of a core before, {idle_after:.2f} "
        "% with them; ack of one record, acks=1, "
        f"p50 {p50[0]:,.0f} us before, {p50[1]:,.0f} with them, p99 {p99[0]:,.0f}, {p99[1]:,.0f}"
    )
    return {
        "name": "connections that say nothing", "asked": CONNECTIONS, "open": opened,
        "bounded_by": bounded_by,
        "closed_by_the_appliance": closed, "seconds_to_open": seconds, "kb_each": each_kb,
        "idle_percent_of_a_core": [idle_before, idle_after], "ack_p50_us": p50, "ack_p99_us": p99,
    }  # fmt: skip


PARTS = {"width": width, "producers": producers_at_once, "connections": connections}


def main() -> int:
    wanted = sys.argv[1:] or list(PARTS)
    where = machine()
    print(f"Tailrace's breadth on {where['cpu']}, {where['cores']} cores, commit {where['commit']}")
    found = {name: PARTS[name]() for name in wanted}
    path = RESULTS / f"breadth-{where['date']}-{where['commit']}.json"
    kept = json.loads(path.read_text())["parts"] if path.exists() else {}
    path.write_text(
        json.dumps(
            {
                "command": "python -P -m bench.stages.breadth",
                "machine": where,
                "parts": {**kept, **found},
            },
            indent=1,
        )
        + "\n"
    )
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
