"""Cost of a batch at each stage, the prediction for more cores, and breadth: `make bench-scale
[BASE=COMMIT] [WRITE_DOCS=1] [PARTS="budget model breadth"]`.

1. budget (budget.py): microseconds of CPU per batch and stage, context switches and page faults,
   for batches of three sizes; with BASE another commit's beside.
2. model: with n_i processes of stage i and c cores, batches/s = min(min_i(n_i / cost_i), c / sum of
   costs). Checked where it can be: on one core and on two, with 1 and 2 workers, 1 and 2 fronts.
   Beyond that it is paper: memory bandwidth and the disk are not in it.
3. breadth (breadth.py): one producer to 64 partitions and 200 topics, 100 producers at once, 10,000
   connections that say nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pyarrow as pa

from bench import doc_tables, write_docs
from bench.conditions import Conditions
from bench.measure import RESULTS, machine
from bench.other_tree import short_name
from bench.stages import breadth, budget
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

SECONDS = float(os.environ.get("SECONDS", "2"))
MODEL_ROWS = 650
REPETITIONS = int(os.environ.get("REPETITIONS", "5"))
PARTS = ("budget", "model", "breadth")
_CONTEXT = multiprocessing.get_context("spawn")


@contextmanager
def appliance(workers: int = 1, fronts: int = 1) -> Iterator[EmbeddedAppliance]:
    """On a fresh directory. Two workers are pinned, one to each of the first cores that we
    may use.
    """
    cores = sorted(os.sched_getaffinity(0))
    settings: dict[str, Any] = {"ring_bytes": 64 << 20, "fronts": fronts}
    if workers > 1:
        settings["cores"] = json.dumps(
            (cores * workers)[:workers] if len(cores) >= workers else cores
        )
    with tempfile.TemporaryDirectory(
        prefix="tailrace-scale-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        running = start_embedded(
            data_dir=f"{directory}/data", settings=settings, auto_create_topics=False
        )
        try:
            yield running
        finally:
            running.stop()


def run_times(pid: int) -> dict[str, tuple[float, int]]:
    """Seconds on a CPU and context switches of each process of an appliance, by name; all threads
    of each.
    """
    found: dict[str, tuple[float, int]] = {}
    for process in psutil.Process(pid).children():
        nanoseconds = 0
        for thread in os.listdir(f"/proc/{process.pid}/task"):
            with open(f"/proc/{process.pid}/task/{thread}/schedstat", encoding="ascii") as file:
                nanoseconds += int(file.read().split()[0])
        with open(f"/proc/{process.pid}/comm", encoding="ascii") as file:
            name = file.read().strip().removeprefix("tr-").rpartition("-")[0]
        seconds, switches = found.get(name, (0.0, 0))
        counts = process.num_ctx_switches()
        found[name] = seconds + nanoseconds / 1e9, switches + counts.voluntary + counts.involuntary
    return found


def _produce(
    address: str, topic: str, partition: int, rows: int, barrier: Any, results: Any
) -> None:
    batch = pa.record_batch({"value": pa.array([os.urandom(100)] * rows, pa.binary())})
    with Producer(address, acks=1, batch_size=max(1 << 20, 200 * rows)) as producer:
        for _ in range(20):
            producer.send_arrow(topic, batch, partition=partition).result(30)
        barrier.wait(60)
        used, begun, count = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), 0
        while time.perf_counter() - begun < SECONDS:
            producer.send_arrow(topic, batch, partition=partition)
            count += 1
        producer.flush()
        seconds, now = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    results.put((count, seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime))


def load(
    running: EmbeddedAppliance, rows: int, producers: int = 1
) -> tuple[float, dict[str, float], dict[str, float]]:
    """(batches/s, CPU microseconds per batch by process, context switches per batch by process)."""
    topic = f"t{time.monotonic_ns()}"
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic(topic, max(2, producers))])
    barrier, results = _CONTEXT.Barrier(producers + 1), _CONTEXT.Queue()
    addresses = [running.addresses[number % len(running.addresses)] for number in range(producers)]
    children = [
        _CONTEXT.Process(target=_produce, args=(a, topic, n, rows, barrier, results))
        for n, a in enumerate(addresses)
    ]
    for child in children:
        child.start()
    barrier.wait(60)
    before = run_times(running.pid)
    found = [results.get(timeout=120) for _ in children]
    after = run_times(running.pid)
    for child in children:
        child.join()
    count = sum(item[0] for item in found)
    rate = sum(item[0] / item[1] for item in found)
    costs = {name: (after[name][0] - before[name][0]) / count * 1e6 for name in after}
    costs["producer"] = sum(item[2] for item in found) / count * 1e6
    return rate, costs, {name: (after[name][1] - before[name][1]) / count for name in after}


def predict(cost: dict[str, float], cores: int, workers: int, fronts: int, producers: int) -> float:
    """Batches/s of the model; `cost` in CPU microseconds per batch."""
    counts = {"producer": producers, "front": fronts, "worker": workers, "flusher": 1}
    return 1e6 * min(
        min(counts[stage] / cost[stage] for stage in counts),
        cores / sum(cost[stage] for stage in counts),
    )


def model() -> list[dict[str, Any]]:
    """Part 2."""
    rows: list[dict[str, Any]] = []
    cost: dict[str, float] = {}
    everything = sorted(os.sched_getaffinity(0))
    print(
        f"\n{'CORES WORKERS FRONTS':<24}{'MEASURED':>12}{'PREDICTED':>12}   batches of "
        f"{MODEL_ROWS} x 100 B a second, 2 producers"
    )
    for cores in range(1, min(2, len(everything)) + 1):
        for workers, fronts in ((1, 1), (2, 1), (1, 2), (2, 2)):
            if workers > cores:
                continue  # a worker has a core of its own
            os.sched_setaffinity(0, everything[:cores])
            try:
                with appliance(workers, fronts) as running:
                    runs = [load(running, MODEL_ROWS, 2) for _ in range(REPETITIONS)]
            finally:
                os.sched_setaffinity(0, everything)
            rates = [run[0] for run in runs]
            cost = {
                stage: statistics.median(run[1][stage] for run in runs)
                for stage in ("producer", "front", "worker", "flusher")
            }
            predicted = predict(cost, cores, workers, fronts, 2)
            print(
                f"{cores:<6}{workers:<8}{fronts:<10}{statistics.median(rates):>12,.0f}{predicted:>12,.0f} "  # noqa: E501
                ""
                ""
                f"  {min(rates):,.0f} .. {max(rates):,.0f}"
            )
            rows.append(
                {
                    "cores": cores,
                    "workers": workers,
                    "fronts": fronts,
                    "measured": rates,
                    "predicted": predicted,
                    "cost_us": cost,
                }
            )
    for cores in (4, 8, 16, 64):
        workers = max(1, cores - 4)
        predicted = predict(cost, cores, workers, 2, cores)
        print(
            f"{cores:<6}{workers:<8}{2:<10}{'':>12}{predicted:>12,.0f}   on paper: "
            f"{predicted * MODEL_ROWS / 1e6:.1f} M records/s; one flusher, 2 fronts"
        )
        rows.append({"cores": cores, "workers": workers, "fronts": 2, "predicted": predicted})
    return rows


def main() -> int:
    wanted = os.environ.get("PARTS", " ".join(PARTS)).split()
    conditions = Conditions()
    where = machine()
    print(
        f"Tailrace at scale, on {where['cpu']}, {where['cores']} cores, commit "
        f"{where['commit']}\n{conditions.sentence()}\n"
    )
    found: dict[str, Any] = {}
    if "budget" in wanted:
        base = os.environ.get("BASE") or None
        beside = f"BASE={short_name(base)} " if base else ""
        found["budget"] = budget.run(base, budget.ROUNDS, 1.0, f"{beside}make bench-scale")
    if "model" in wanted:
        found["model"] = model()
    if "breadth" in wanted:
        found["breadth"] = {name: part() for name, part in breadth.PARTS.items()}
    part = "" if set(PARTS) <= set(wanted) else f"-{'-'.join(wanted)}"
    path = RESULTS / f"scale-{where['date']}-{where['commit']}{part}.json"
    result = {
        "command": "make bench-scale",
        "parts": wanted,
        "machine": conditions.report(),
        **found,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    if os.environ.get("WRITE_DOCS"):
        write_docs.write(doc_tables.tables_of(result))
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
