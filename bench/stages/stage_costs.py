"""One pass over what a batch costs each stage; run by its path in a process of the tree that is
measured (see budget.py): only the SDK's public face is used.

    stage_costs.py MEASURE [SCALE] [SIZE]                        prints JSON: case -> what `measure` returns
    stage_costs.py PRODUCE ADDRESS TOPIC ROWS ACKS COUNT         the producer of one case; the other end drives it through its standard input

CPU time is the scheduler's own count for each thread (schedstat): it does not depend on what else
runs, as time by the clock does, but on caches that others fill. Faults and context switches are of
whole processes. A fixed number of batches is sent, and the clock of the count stops when the
flusher is quiet again: with acks=1 it is behind.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

SIZES = {"1 KiB": (10, 3_000), "65 KiB": (650, 1_500), "1 MiB": (8_800, 150)}
"""Records of 100 bytes in a batch, and how many batches."""
ACKS = ("1", "all")
STAGES = (
    "producer",
    "producer I/O",
    "producer helpers",
    "front",
    "front I/O",
    "worker",
    "flusher",
    "others",
)
WARM_UP = 30
RING_BYTES = 64 << 20
GONE_ROUND = 1.25
"""Before the first case the ring is written this many times: its pages are there, as they are in an
appliance that has run for a while.
"""
QUIET_S, QUIET_SHARE, QUIET_MAX_S = 0.05, 0.02, 3.0


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()


def _children(pid: int) -> list[int]:
    return [
        int(child)
        for thread in os.listdir(f"/proc/{pid}/task")
        for child in _read(f"/proc/{pid}/task/{thread}/children").split()
    ]


def _role(pid: int) -> str:
    """Role of a process of the appliance, from the name it gives itself (tr-front-0)."""
    name = _read(f"/proc/{pid}/comm").strip().removeprefix("tr-").rpartition("-")[0]
    return name if name in ("front", "worker", "flusher") else "others"


def _stage(role: str, pid: int, thread: str, name: str) -> str:
    if name.startswith("ZMQbg"):
        return f"{role} I/O" if role in ("producer", "front") else role
    return "producer helpers" if role == "producer" and thread != str(pid) else role


def look(roles: dict[int, str]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """(CPU nanoseconds of each stage, context switches of each role, page faults of each role)
    until now.
    """
    cpu: Counter[str] = Counter()
    switches: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for pid, role in roles.items():
        for thread in os.listdir(f"/proc/{pid}/task"):
            base = f"/proc/{pid}/task/{thread}"
            cpu[_stage(role, pid, thread, _read(f"{base}/comm"))] += int(
                _read(f"{base}/schedstat").split()[0]
            )
            switches[role] += sum(
                int(line.split()[1])
                for line in _read(f"{base}/status").splitlines()
                if "ctxt_switches" in line
            )
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        faults[role] += int(fields[7]) + int(fields[9])  # minflt, majflt
    return cpu, switches, faults


def _await_quiet(roles: dict[int, str]) -> None:
    """Until the flusher does next to nothing: the disk has what was sent."""
    deadline, before = time.monotonic() + QUIET_MAX_S, look(roles)[0]["flusher"]
    while time.monotonic() < deadline:
        time.sleep(QUIET_S)
        now = look(roles)[0]["flusher"]
        if now - before < QUIET_SHARE * QUIET_S * 1e9:
            return
        before = now


def measure(
    address: str, supervisor: int, topic: str, rows: int, acks: str, count: int
) -> dict[str, Any]:
    """One case: {"cpu_us": stage -> per batch, "switches": role -> per batch, "faults": role -> per
    batch, "batches_per_s"}.
    """
    command = [
        sys.executable,
        "-P",
        __file__,
        "PRODUCE",
        address,
        topic,
        str(rows),
        acks,
        str(count),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def told(word: str) -> list[str]:
            line = child.stdout.readline().split()  # type: ignore[union-attr]
            if line[:1] != [word]:
                raise RuntimeError(f"the producer of {rows} rows, acks={acks}, ended early: {line}")
            return line

        def tell() -> None:
            child.stdin.write("go on\n")  # type: ignore[union-attr]
            child.stdin.flush()  # type: ignore[union-attr]

        told("ready")
        roles = {
            supervisor: "others",
            **{pid: _role(pid) for pid in _children(supervisor)},
            child.pid: "producer",
        }
        _await_quiet(roles)
        before = look(roles)
        tell()
        seconds = float(told("done")[1])
        _await_quiet(roles)
        after = look(roles)
        tell()
    cpu, switches, faults = (
        {name: (now[name] - then[name]) / count for name in now}
        for then, now in zip(before, after, strict=True)
    )
    return {
        "cpu_us": {stage: cpu.get(stage, 0.0) / 1e3 for stage in STAGES}
        | {"all": sum(cpu.values()) / 1e3},
        "switches": switches,
        "faults": faults,
        "batches_per_s": count / seconds,
    }


def produce(address: str, topic: str, rows: int, acks: str, count: int) -> None:
    """The producer's process."""
    import pyarrow as pa

    from tailrace import Producer

    batch = pa.record_batch({"value": pa.array([os.urandom(100)] * rows, pa.binary())})
    with Producer(
        address, acks=acks if acks == "all" else int(acks), batch_size=2 << 20
    ) as producer:
        for _ in range(WARM_UP):
            producer.send_arrow(topic, batch)
        producer.flush()
        print("ready", flush=True)
        sys.stdin.readline()
        begun = time.perf_counter()
        for _ in range(count):
            producer.send_arrow(topic, batch)
        producer.flush()
        print("done", time.perf_counter() - begun, flush=True)
        sys.stdin.readline()


def _fill_ring(address: str) -> None:
    import pyarrow as pa

    from tailrace import Admin, NewTopic, Producer

    rows = 8_000
    batch = pa.record_batch({"value": pa.array([os.urandom(100)] * rows, pa.binary())})
    with Admin(address) as admin:
        admin.create_topics([NewTopic("before")])
    with Producer(address, acks="all", batch_size=2 << 20) as producer:
        for _ in range(int(GONE_ROUND * RING_BYTES) // (rows * 100)):
            producer.send_arrow("before", batch)


def one_pass(scale: float, only: str) -> dict[str, Any]:
    """Every size and acks against an appliance of its own, which is warm after the first."""
    from tailrace import Admin, NewTopic
    from tailrace.embedded_appliance import start_embedded

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(
        prefix="tailrace-budget-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        running = start_embedded(
            data_dir=str(pathlib.Path(directory) / "data"),
            settings={"ring_bytes": RING_BYTES},
            auto_create_topics=False,
        )
        try:
            _fill_ring(running.address)
            for number, (size, (rows, count)) in enumerate(SIZES.items()):
                if only not in ("", size):
                    continue
                for acks in ACKS:
                    topic = f"t{number}-{acks}"
                    with Admin(running.address) as admin:
                        admin.create_topics([NewTopic(topic)])
                    found[f"{size}, acks={acks}"] = measure(
                        running.address, running.pid, topic, rows, acks, max(10, int(count * scale))
                    )
        finally:
            running.stop()
    return found


if __name__ == "__main__":
    if sys.argv[1] == "PRODUCE":
        produce(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
    else:
        print(
            json.dumps(
                one_pass(float(sys.argv[2] if len(sys.argv) > 2 else 1), "".join(sys.argv[3:4]))
            )
        )
