"""`make bench-pairs BASE=COMMIT`: this tree beside another commit on the same machine, in pairs: A B, B A, A B ... and the ratio of each pair.

A machine that drifts, drifts for both; so the ratio tells of a change what two separate runs cannot. Each figure is taken in a process of its own, against an
appliance of its own, with PYTHONPATH set to one tree or the other. Only what both trees have is used of them: the SDK's public face.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"
ROOT = pathlib.Path(__file__).resolve().parent.parent
PAIRS = 6
SECONDS = 1.5


def _produced(topic: str, address: str, send: Callable[[Any], int]) -> float:
    """Records acknowledged a second; `send` sends some and returns how many."""
    from tailrace import Admin, NewTopic, Producer

    with Admin(address) as admin:
        admin.create_topics([NewTopic(topic)])
    with Producer(address, acks="all", batch_size=256 << 10) as producer:
        producer.send(topic, b"first").result(30)
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < SECONDS:
            count += send(producer)
        producer.flush()
        return count / (time.perf_counter() - begun)


def send_100(address: str) -> dict[str, float]:
    """`send()` of 100-byte records, acks=all: records/s."""
    payload, keys = os.urandom(100), [b"k%d" % n for n in range(64)]

    def send(producer: Any) -> int:
        for key in keys:
            producer.send("t", payload, key)
        return len(keys)

    return {"send() 100 B, acks=all, records/s": _produced("t", address, send)}


def arrow_100(address: str) -> dict[str, float]:
    """`send_arrow()` of frames of 100-byte records, acks=all: records/s."""
    import pyarrow as pa

    frame = pa.table({"value": pa.array([os.urandom(100)] * 2_000, pa.binary())})

    def send(producer: Any) -> int:
        producer.send_arrow("t", frame)
        return 2_000

    return {"send_arrow() 100 B, acks=all, records/s": _produced("t", address, send)}


def small_batches(address: str) -> dict[str, float]:
    """The front's and the worker's cost of a batch: many that are small."""
    import pyarrow as pa

    frame = pa.table({"value": pa.array([os.urandom(100)] * 10, pa.binary())})

    def send(producer: Any) -> int:
        producer.send_arrow("t", frame)
        return 1

    return {"batches of 1 kB, acks=all, batches/s": _produced("t", address, send)}


def acks(address: str) -> dict[str, float]:
    """One record at a time, acks=1 and all: p50 and p99, microseconds."""
    from tailrace import Admin, NewTopic, Producer

    found: dict[str, float] = {}
    for level in (1, "all"):
        with Admin(address) as admin:
            admin.create_topics([NewTopic(f"a-{level}")])
        with Producer(address, acks=level) as producer:
            times = []
            for _ in range(1_100):
                begun = time.perf_counter()
                producer.send(f"a-{level}", b"x" * 100).result(10)
                times.append((time.perf_counter() - begun) * 1e6)
        ordered = sorted(times[100:])
        found |= {
            f"ack of one record, acks={level}, {name}, us": ordered[int(share * len(ordered))]
            for name, share in (("p50", 0.5), ("p99", 0.99))
        }
    return found


def consume(address: str) -> dict[str, float]:
    """Reading 100-byte records as objects and as Arrow: records/s."""
    import pyarrow as pa

    from tailrace import Admin, Consumer, NewTopic, Producer

    frame = pa.table({"value": pa.array([os.urandom(100)] * 2_000, pa.binary())})
    with Admin(address) as admin:
        admin.create_topics([NewTopic("c")])
    with Producer(address) as producer:
        for _ in range(500):
            producer.send_arrow("c", frame)
    found = {}
    for how in ("Arrow", "Record objects"):
        with Consumer("c", bootstrap=address, auto_offset_reset="earliest", max_poll_records=10_000) as consumer:
            begun, count = time.perf_counter(), 0
            while count < 1_000_000:
                count += sum(map(len, consumer.poll_arrow(10_000))) if how == "Arrow" else len(consumer.poll(10_000))
            found[f"consume 100 B as {how}, records/s"] = count / (time.perf_counter() - begun)
    return found


CASES: dict[str, Callable[[str], dict[str, float]]] = {case.__name__: case for case in (send_100, arrow_100, small_batches, acks, consume)}


def run_case(name: str) -> None:
    """In a process of its own: one case against an appliance of its own; prints JSON."""
    from tailrace.private_appliance import start_embedded

    with tempfile.TemporaryDirectory(prefix="tailrace-bench-", dir=os.environ.get("TAILRACE_BENCH_DIR")) as directory:
        begun = time.perf_counter()
        running = start_embedded(data_dir=os.path.join(directory, "data"), settings={"ring_bytes": 64 << 20}, auto_create_topics=False)
        ready_ms = (time.perf_counter() - begun) * 1e3
        try:
            print(json.dumps(CASES[name](running.address) | {"start to ready, ms": ready_ms}))
        finally:
            running.stop()


def measure(tree: pathlib.Path, name: str) -> dict[str, float]:
    """One case in a process of `tree`: figure -> value."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, "-P", __file__, "--case", name], env=environment, stdout=subprocess.PIPE, check=True, cwd=tree)
    return dict(json.loads(done.stdout))


def main(base: str) -> int:
    sys.path.insert(0, str(ROOT))
    from bench.measure import machine

    commit = subprocess.run(["git", "rev-parse", "--short", base], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="tailrace-base-") as directory:
        other = pathlib.Path(directory) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(other), commit], check=True, cwd=ROOT)
        try:
            for tree in (ROOT, other):  # as it is installed: without it the first start pays for all
                subprocess.run(
                    [sys.executable, "-m", "compileall", "-q", "tailrace", "shm", "workers", "netfront", "appliance"], cwd=tree, check=False
                )
            pairs: dict[str, list[tuple[float, float]]] = {}
            for number in range(PAIRS):
                for name in CASES:
                    trees = (ROOT, other) if number % 2 == 0 else (other, ROOT)
                    found = {tree: measure(tree, name) for tree in trees}
                    for figure, value in found[ROOT].items():
                        pairs.setdefault(figure, []).append((value, found[other][figure]))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], check=True, cwd=ROOT)
    where = machine()
    print(f"{where['commit']} against {commit}, {PAIRS} pairs, on {where['cpu']}, {where['cores']} cores\n")
    print(f"{'WHAT':<45} {'THIS':>12} {commit.upper():>12} {'RATIO':>7}  LEAST .. MOST")
    rows = []
    for figure, values in pairs.items():
        ratios = [mine / theirs for mine, theirs in values]
        mine, theirs = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"{figure:<45} {mine:>12,.0f} {theirs:>12,.0f} {statistics.median(ratios):>7.3f}  {min(ratios):.3f} .. {max(ratios):.3f}")
        rows.append({"name": figure, "this": mine, "base": theirs, "ratio": statistics.median(ratios), "pairs": values})
    path = RESULTS / f"pairs-{where['date']}-{where['commit']}-{commit}.json"
    path.write_text(json.dumps({"command": f"make bench-pairs BASE={commit}", "machine": where, "figures": rows}, indent=1) + "\n")
    print(f"\nwritten to {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        run_case(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1]))
