"""`await send()` of `AsyncProducer` beside `send()` of `Producer`, in turns:
`make bench-awaited-send`.

Each turn sends the same records to the same topic from a process of its own and flushes. A figure
is the processor time of the client's process, all threads, for a record. Processor time is what
bounds a program that sends all the time, and it holds on a busy machine too.

`ROUNDS=5 RECORDS=200000`. Prints a table and writes a file into `bench/results`.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from bench.measure import RESULTS, machine
from tailrace import Admin, NewTopic, Producer
from tailrace.aio import AsyncProducer
from tailrace.embedded_appliance import start_embedded

GOAL = 0.8
"""Plain processor time over awaited processor time."""
SHAPES = ((100, True), (21, False), (1_000, True))
"""(bytes of the value, with a key)."""
TOPIC = "awaited"
BATCH_BYTES = 256 << 10
KEYS = [b"k%d" % number for number in range(64)]


def plain(address: str, value: bytes, keys: list[bytes | None], count: int) -> float:
    """Processor time of `send()`, ns a record."""
    with Producer(address, acks=1, batch_size=BATCH_BYTES) as producer:
        producer.send(TOPIC, b"first").result(60)
        begun = time.process_time_ns()
        for _ in range(count // len(keys)):
            for key in keys:
                producer.send(TOPIC, value, key)
        producer.flush()
        return (time.process_time_ns() - begun) / count


async def awaited(address: str, value: bytes, keys: list[bytes | None], count: int) -> float:
    """Processor time of `await send()`, ns a record."""
    async with AsyncProducer(address, acks=1, batch_size=BATCH_BYTES) as producer:
        await (await producer.send(TOPIC, b"first"))
        begun = time.process_time_ns()
        for _ in range(count // len(keys)):
            for key in keys:
                await producer.send(TOPIC, value, key)
        await producer.flush()
        return (time.process_time_ns() - begun) / count


def run_turn(kind: str, address: str, size: int, is_keyed: bool, count: int) -> None:
    """In a process of its own: prints ns a record."""
    keys: list[bytes | None] = [*KEYS] if is_keyed else [None] * len(KEYS)
    value = os.urandom(size)
    if kind == "plain":
        print(plain(address, value, keys, count))
    else:
        print(asyncio.run(awaited(address, value, keys, count)))


def _turn(kind: str, address: str, size: int, is_keyed: bool, count: int) -> float:
    command = [
        sys.executable, "-P", "-m", "bench.awaited_send", kind, address, str(size),
        str(int(is_keyed)), str(count),
    ]  # fmt: skip
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(address: str, rounds: int, count: int) -> list[dict[str, Any]]:
    """A row for each shape: ns a record of both, and the ratio of each pair."""
    rows = []
    for size, is_keyed in SHAPES:
        pairs = []
        for number in range(rounds):
            kinds = ("plain", "awaited") if number % 2 == 0 else ("awaited", "plain")
            taken = {kind: _turn(kind, address, size, is_keyed, count) for kind in kinds}
            pairs.append((taken["plain"], taken["awaited"]))
        ratios = [plain_ns / awaited_ns for plain_ns, awaited_ns in pairs]
        rows.append(
            {
                "name": f"{size} B{' with a key' if is_keyed else ''}",
                "plain_ns": statistics.median(each[0] for each in pairs),
                "awaited_ns": statistics.median(each[1] for each in pairs),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return rows


def main() -> int:
    rounds = int(os.environ.get("ROUNDS", "5"))
    count = int(os.environ.get("RECORDS", "200000"))
    appliance = start_embedded(settings={"ring_bytes": 64 << 20})
    try:
        with Admin(appliance.address) as admin:
            admin.create_topics([NewTopic(TOPIC)])
        rows = measure(appliance.address, rounds, count)
    finally:
        appliance.stop()
    print(f"{'record':<20}{'send, ns':>10}{'await, ns':>11}{'ratio':>8}   least .. most")
    for row in rows:
        print(
            f"{row['name']:<20}{row['plain_ns']:>10.0f}{row['awaited_ns']:>11.0f}"
            f"{row['ratio']:>8.2f}   {row['least']:.2f} .. {row['most']:.2f}"
        )
    host = machine()
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"awaited-send-{host['date']}-{host['commit']}.json"
    path.write_text(
        json.dumps({"machine": host, "goal": GOAL, "rounds": rounds, "rows": rows}, indent=1) + "\n"
    )
    print(f"\nprocessor time of the client; goal: a ratio of {GOAL}. Written to {path}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        kind, address, size, is_keyed, count = sys.argv[1:]
        run_turn(kind, address, int(size), is_keyed == "1", int(count))
    else:
        sys.exit(main())
