"""Costs of starts: `python -P bench/at_rest/starts.py [repetitions]`, or `... BASE=DIRECTORY` for
pairs with another tree: this, that, that, this ...

    ready, first ack    from the start of an embedded appliance on a directory that has a topic, as in `bench.at_rest.footprint`
    memory              of all processes with the console, without shared memory, as PSS
    worker, front       from SIGKILL to the next acknowledged record (acks=all), on an appliance that has served
    start and stop      of an embedded appliance: CPU of all its processes

Only what earlier trees have is used of each: the SDK's public face. Each repetition is a process of
its own, with PYTHONPATH set to its tree.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def measure_starts() -> dict[str, float]:
    """One repetition, in this process's tree."""
    import psutil

    from bench.at_rest.footprint import measure_footprint, processes
    from bench.measure import private_memory_mb
    from tailrace import Producer, embedded

    def cpu_ms() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (used.ru_utime + used.ru_stime) * 1e3

    before = cpu_ms()
    with embedded():
        pass
    found = {"start and stop, CPU ms": cpu_ms() - before}
    measure_footprint()  # the client's own modules are loaded by then
    footprint = measure_footprint()
    found |= {
        "start to ready, ms": footprint.ready_ms,
        "start to first ack, ms": footprint.first_ack_ms,
    }
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory,
        embedded(
            data_dir=os.path.join(directory, "data"),
            settings={"ring_bytes": 64 << 20, "http.listen": "127.0.0.1:0"},
        ) as running,
        Producer(running.address, acks="all", linger_ms=0) as producer,
    ):
        producer.send("first", b"x").result(30)
        time.sleep(2)  # the console begins behind the others
        pids = processes(running.pid)
        found["memory with console, MB"] = private_memory_mb(pids)[0]
        names = {psutil.Process(pid).name(): pid for pid in pids}
        for victim in (
            "worker",
            "front",
        ):  # each once: one that ends again soon is restarted later and later
            os.kill(names[f"tr-{victim}-0"], signal.SIGKILL)
            begun = time.perf_counter()
            producer.send("first", b"y").result(30)
            found[f"SIGKILL of the {victim} to the next ack, ms"] = (
                time.perf_counter() - begun
            ) * 1e3
    return found


def run_in(tree: pathlib.Path) -> dict[str, float]:
    """One repetition in a process of `tree`."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--one"],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        cwd=tree,
    )
    return dict(json.loads(done.stdout))


def show(title: str, rows: list[dict[str, float]]) -> None:
    print(title)
    for name in rows[0]:
        values = sorted(row[name] for row in rows)
        print(
            f"  {name:<42} {statistics.median(values):>8.1f}  {values[0]:.1f} .. {values[-1]:.1f}"
        )


def main(arguments: list[str]) -> int:
    repetitions = next((int(argument) for argument in arguments if argument.isdigit()), 5)
    base = next(
        (
            pathlib.Path(argument.partition("=")[2]).resolve()
            for argument in arguments
            if argument.startswith("BASE=")
        ),
        None,
    )
    found: dict[pathlib.Path, list[dict[str, float]]] = {}
    for number in range(repetitions):
        trees = [ROOT] if base is None else [ROOT, base] if number % 2 == 0 else [base, ROOT]
        for tree in trees:
            found.setdefault(tree, []).append(run_in(tree))
    for tree, rows in found.items():
        show(str(tree), rows)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--one"]:
        print(json.dumps(measure_starts()))
    else:
        sys.exit(main(sys.argv[1:]))
