"""A restore beside `dd` of as many bytes to the same disk, in turn, and what a running backup costs
producers: `python -m bench.at_rest.restore [GB] [rounds]`, on a machine that does nothing else.

A full disk of the size twice is needed (TAILRACE_BENCH_DIR). Each figure has the load of its
minute beside it: at more than 1 it says little.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from bench.at_rest.recovery import fill
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

LOAD_S = 20.0


def tailrace(*arguments: str) -> float:
    """Run a command. Returns its seconds."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "appliance.cli.main", *arguments],
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    return time.perf_counter() - begun


def dd(path: pathlib.Path, count: int) -> float:
    """Write and sync so many bytes. Returns the seconds."""
    begun = time.perf_counter()
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={count >> 20}", "conv=fsync"],
        check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    path.unlink()
    return seconds


def size_of(directory: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def rate(appliance: EmbeddedAppliance) -> float:
    """Records a second of one producer at full speed, acks=all."""
    value, count, begun = bytes(1_000), 0, time.perf_counter()
    with Producer(appliance.address, acks="all") as producer:
        while time.perf_counter() - begun < LOAD_S:
            for _ in range(1_000):
                producer.send("load", value)
            count += 1_000
        producer.flush()
    return count / (time.perf_counter() - begun)


def cost(appliance: EmbeddedAppliance, target: pathlib.Path) -> tuple[float, float]:
    """Rates without and with backups one after the other."""
    without = rate(appliance)
    ended = threading.Event()

    def back_up() -> None:
        while not ended.is_set():
            tailrace("backup", str(target), "--data-dir", appliance.data_dir)

    running = threading.Thread(target=back_up)
    running.start()
    try:
        return without, rate(appliance)
    finally:
        ended.set()
        running.join()


def show(name: str, value: str) -> None:
    print(f"{name:<10} {value}   load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> int:
    total = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory(
        prefix="tailrace-restore-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as name:
        home = pathlib.Path(name)
        backup, restored = home / "backup", home / "restored"
        appliance = start_embedded(data_dir=str(home / "data"), auto_create_topics=False)
        try:
            with Admin(appliance.address) as admin:
                kept = {"retention.ms": -1}
                small = {"retention.bytes": 1 << 28, "segment.bytes": 1 << 26}
                admin.create_topics([NewTopic("big", 1, kept), NewTopic("load", 1, small)])
            pairs = [cost(appliance, home / "costs") for _ in range(rounds)]
            for without, beside in pairs:
                show("backup", f"{without:,.0f} -> {beside:,.0f} records/s {beside / without:.3f}")
            shutil.rmtree(home / "costs")
            fill(appliance.address, int(total * 1e9))
            seconds = tailrace("backup", str(backup), "--data-dir", appliance.data_dir)
        finally:
            appliance.stop()
        shutil.rmtree(home / "data")
        count = size_of(backup)
        show("first", f"{count / seconds / 1e6:,.0f} MB/s of {count / 1e9:.1f} GB")
        ratios = []
        for _ in range(rounds):
            disk = count / dd(home / "dd", count)
            ours = count / tailrace("restore", str(backup), str(restored))
            shutil.rmtree(restored)
            ratios.append(ours / disk)
            show("restore", f"{ours / 1e6:,.0f} MB/s, dd {disk / 1e6:,.0f}: {ours / disk:.2f}")
        print(
            f"restore {statistics.median(ratios):.2f} of the disk (0.8 is the goal); backup's cost "
            f"{1 - statistics.median(beside / without for without, beside in pairs):.3f} (0.03)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
