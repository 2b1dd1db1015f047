"""`make bench-pairs BASE=COMMIT [PAIRS=6] [CASES="sends acks"]`: this tree beside another commit on
the same machine, in pairs: A B, B A, A B ... and the ratio of each pair. Under six minutes.

A machine that drifts, drifts for both; so the ratio tells of a change what two separate runs
cannot. Each case is taken in a process of its own, against an appliance of its own, with PYTHONPATH
set to one tree or the other. Only what both trees have is used of them: the SDK's public face.
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
from functools import partial
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAIRS = int(os.environ.get("PAIRS", "6"))
SECONDS = 1.0


def _produced(address: str, topic: str, acks: int | str, send: Callable[[Any, str], int]) -> float:
    """Records acknowledged a second; `send` sends some and returns how many it counts."""
    from tailrace import Admin, NewTopic, Producer

    with Admin(address) as admin:
        admin.create_topics([NewTopic(topic)])
    with Producer(
        address, acks=acks, batch_size=2 << 20 if topic.startswith("arrow") else 256 << 10
    ) as producer:
        producer.send(topic, b"first").result(30)
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < SECONDS:
            count += send(producer, topic)
        producer.flush()
        return count / (time.perf_counter() - begun)


def sends(address: str) -> dict[str, float]:
    """`send()` with a key, of 100 and 1,000 bytes, and with `partition=`."""
    keys = [b"k%d" % n for n in range(64)]

    def sender(size: int, **given: Any) -> Callable[[Any, str], int]:
        payload = os.urandom(size)

        def send(producer: Any, topic: str) -> int:
            for key in keys:
                producer.send(topic, payload, key, **given)
            return len(keys)

        return send

    return {
        "send() 100 B, acks=all, records/s": _produced(address, "small", "all", sender(100)),
        "send(partition=) 100 B, acks=1, records/s": _produced(
            address, "given", 1, sender(100, partition=0)
        ),
        "send() 1,000 B, acks=1, records/s": _produced(address, "large", 1, sender(1_000)),
    }


def arrow(address: str) -> dict[str, float]:
    """`send_arrow()` of frames of 100-byte records, acks=all, from 1 kB (the cost of a batch in
    front and worker) to 1 MiB.
    """
    import pyarrow as pa

    def sender(size: int, rows: int, counted: float) -> Callable[[Any, str], Any]:
        frame = pa.record_batch({"value": pa.array([os.urandom(size)] * rows, pa.binary())})

        def send(producer: Any, topic: str) -> float:
            producer.send_arrow(topic, frame)
            return counted

        return send

    return {
        "send_arrow() 100 B by 2,000, acks=all, records/s": _produced(
            address, "arrow-rows", "all", sender(100, 2_000, 2_000)
        ),
        "batches of 1 kB, acks=all, batches/s": _produced(
            address, "arrow-tiny", "all", sender(100, 10, 1)
        ),
        "Arrow 64 KiB, acks=1, MB/s": _produced(address, "arrow-64", 1, sender(1_000, 65, 0.065)),
        "Arrow 1 MiB, acks=1, MB/s": _produced(
            address, "arrow-1024", 1, sender(1_000, 1_020, 1.02)
        ),
    }


def acks(address: str) -> dict[str, float]:
    """One record at a time, acks=1 and all: p50 and p99, microseconds."""
    from tailrace import Admin, NewTopic, Producer

    found: dict[str, float] = {}
    for level in (1, "all"):
        with Admin(address) as admin:
            admin.create_topics([NewTopic(f"a-{level}")])
        with Producer(address, acks=level) as producer:
            times = []
            for _ in range(800):
                begun = time.perf_counter()
                producer.send(f"a-{level}", b"x" * 100).result(10)
                times.append((time.perf_counter() - begun) * 1e6)
        ordered = sorted(times[100:])
        found |= {
            f"ack of one record, acks={level}, {name}, us": ordered[int(share * len(ordered))]
            for name, share in (("p50", 0.5), ("p99", 0.99))
        }
    return found


def singles(address: str) -> dict[str, float]:
    """Single sends at 10,000 a second, linger 0, 3 partitions: from when each was to be sent until
    its acknowledgement.
    """
    from tailrace import Admin, NewTopic, Producer

    rate, seconds, times = 10_000, 1.5, []
    with Admin(address) as admin:
        admin.create_topics([NewTopic("singles", 3)])

    def ended(due_ns: int, metadata: object, error: object) -> None:
        del metadata
        times.append((time.perf_counter_ns() - due_ns) / 1e6 if error is None else float("inf"))

    with Producer(address, acks=1, linger_ms=0) as producer:
        for partition in range(3):
            producer.send("singles", b"first", partition=partition).result(30)
        started_ns = time.perf_counter_ns()
        for number in range(int(rate * seconds)):
            due_ns = started_ns + number * 1_000_000_000 // rate
            while (wait_ns := due_ns - time.perf_counter_ns()) > 0:
                time.sleep(wait_ns / 1e9)
            producer.send("singles", b"x" * 100, on_delivery=partial(ended, due_ns))
        producer.flush()
    ordered = sorted(times[len(times) // 5 :])
    return {
        f"single sends at 10,000/s, linger 0, acks=1, {name}, us": 1e3
        * ordered[int(share * len(ordered))]
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


def consume(address: str) -> dict[str, float]:
    """Reading 100-byte records as objects and as Arrow, records/s, and 1,000-byte records as Arrow,
    MB/s.
    """
    import pyarrow as pa

    from tailrace import Admin, Consumer, NewTopic, Producer

    found = {}
    for size, rows, count, ways in (
        (100, 2_000, 800_000, ("Arrow", "Record objects")),
        (1_000, 250, 200_000, ("Arrow",)),
    ):
        topic = f"c{size}"
        frame = pa.table({"value": pa.array([os.urandom(size)] * rows, pa.binary())})
        with Admin(address) as admin:
            admin.create_topics([NewTopic(topic)])
        with Producer(address) as producer:
            for _ in range(count // rows):
                producer.send_arrow(topic, frame)
        for how in ways:
            with Consumer(
                topic, bootstrap=address, auto_offset_reset="earliest", max_poll_records=10_000
            ) as consumer:
                begun, seen = time.perf_counter(), 0
                while seen < count:
                    seen += (
                        sum(map(len, consumer.poll_arrow(10_000)))
                        if how == "Arrow"
                        else len(consumer.poll(10_000))
                    )
                rate = count / (time.perf_counter() - begun)
            figure = f"consume {size:,} B as {how}, {'records/s' if size == 100 else 'MB/s'}"
            found[figure] = rate if size == 100 else rate * size / 1e6
    return found


CASES: dict[str, Callable[[str], dict[str, float]]] = {
    case.__name__: case for case in (sends, arrow, acks, singles, consume)
}


def run_case(name: str) -> None:
    """In a process of its own: one case against an appliance of its own; prints JSON."""
    import tailrace

    with tempfile.TemporaryDirectory(
        prefix="tailrace-bench-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        begun = time.perf_counter()
        with tailrace.embedded(
            data_dir=os.path.join(directory, "data"),
            settings={"ring_bytes": 64 << 20},
            auto_create_topics=False,
        ) as running:
            ready_ms = (time.perf_counter() - begun) * 1e3
            print(json.dumps(CASES[name](running.address) | {"start to ready, ms": ready_ms}))


def measure(tree: pathlib.Path, name: str, environment: dict[str, str]) -> dict[str, float]:
    """One case in a process of `tree`: figure -> value."""
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--case", name],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        cwd=tree,
    )
    return dict(json.loads(done.stdout))


def main(base: str) -> int:
    sys.path.insert(0, str(ROOT))
    from bench.measure import RESULTS, machine
    from bench.other_tree import environment_of, prepare, short_name, tree_of

    commit, wanted = short_name(base), os.environ.get("CASES", "").split() or list(CASES)
    with tree_of(commit) as other:
        prepare(ROOT)
        pairs: dict[str, list[tuple[float, float]]] = {}
        for number in range(PAIRS):
            for name in wanted:
                trees = (ROOT, other) if number % 2 == 0 else (other, ROOT)
                found = {tree: measure(tree, name, environment_of(tree)) for tree in trees}
                for figure, value in found[ROOT].items():
                    pairs.setdefault(figure, []).append((value, found[other][figure]))
    where = machine()
    print(
        f"{where['commit']} against {commit}, {PAIRS} pairs, on {where['cpu']}, {where['cores']} "
        "cores\n"
    )
    print(f"{'WHAT':<50} {'THIS':>12} {commit.upper():>12} {'RATIO':>7}  LEAST .. MOST")
    rows = []
    for figure, values in pairs.items():
        ratios = [mine / theirs for mine, theirs in values]
        mine, theirs = (statistics.median(column) for column in zip(*values, strict=True))
        print(
            f"{figure:<50} {mine:>12,.0f} {theirs:>12,.0f} {statistics.median(ratios):>7.3f}  "
            f"{min(ratios):.3f} .. {max(ratios):.3f}"
        )
        rows.append(
            {
                "name": figure,
                "this": mine,
                "base": theirs,
                "ratio": statistics.median(ratios),
                "pairs": values,
            }
        )
    part = f"-{'-'.join(wanted)}" if wanted != list(CASES) else ""
    path = RESULTS / f"pairs-{where['date']}-{where['commit']}-{commit}{part}.json"
    path.write_text(
        json.dumps(
            {"command": f"make bench-pairs BASE={commit}", "machine": where, "figures": rows},
            indent=1,
        )
        + "\n"
    )
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        run_case(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1]))
