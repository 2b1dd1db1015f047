"""A streaming query into a topic whose driver, Python workers and appliance are killed at random;
then every row is counted.

    python -P -m tests.crash.spark_sink --kills 50 --seed 1

The query reads files, one for each batch, so that what it is to write is known; a driver that ends
or is killed is started again on the same checkpoint. The suite starts such drivers (`Driver`) with
a crash point of `spark_bridge.sink.crash_points`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

import tailrace
from spark_bridge.sink.crash_points import CRASH_VARIABLE
from tailrace import Admin, NewTopic
from tests.crash.disturbance import DisturbedAppliance

TOPIC = "sunk"
PARTITIONS = 4
ROWS = 5_000
DRIVER_TIMEOUT_S = 300.0


def write_input(directory: Path, number: int, rows: int) -> None:
    """One more file, which becomes a batch: numbers, a line each."""
    directory.mkdir(parents=True, exist_ok=True)
    hidden = directory / f"_{number:06d}"
    hidden.write_text("".join(f"{n}\n" for n in range(number * rows, (number + 1) * rows)))
    hidden.rename(directory / f"{number:06d}.txt")


def start_query(spark: Any, address: str, topic: str, directory: Path) -> Any:
    """The query, over all files that are there, from its checkpoint."""
    lines = (
        spark.readStream.schema("value string")
        .option("maxFilesPerTrigger", "1")
        .text(str(directory / "in"))
    )
    return (
        lines.repartition(2).selectExpr("value as key",
        "value").writeStream.format("tailrace").option("bootstrap", address).option("topic", topic)
        .option("publishTimeoutMs", "60000").option("checkpointLocation",
        str(directory / "checkpoint")).trigger(availableNow=True).start()
    )  # fmt: skip


def run_query(spark: Any, address: str, topic: str, directory: Path) -> None:
    """The same, to its end. Raises what ends it."""
    query = start_query(spark, address, topic, directory)
    try:
        query.awaitTermination()
    finally:
        query.stop()


def committed(directory: Path) -> int:
    """Number of batches that Spark knows to be committed."""
    return _batches(directory / "checkpoint" / "commits")


def planned(directory: Path) -> int:
    """Number of batches that Spark has planned."""
    return _batches(directory / "checkpoint" / "offsets")


def _batches(log: Path) -> int:
    return sum(name.isdecimal() for name in os.listdir(log)) if log.is_dir() else 0


def counted(address: str, topic: str) -> Counter[int]:
    """Count how often each number is in the topic."""
    values = tailrace.scan(topic, address, columns=["value"]).read_all().column("value")
    return Counter(int(value) for value in values.to_pylist())


class Driver:
    """The driver as a process group of its own, with a temporary directory; whatever happens to it,
    `end` leaves nothing behind.
    """

    def __init__(self, address: str, topic: str, directory: Path, crash: str = "") -> None:
        self._scratch = tempfile.mkdtemp(prefix="tk")
        environment = {**os.environ, "TMPDIR": self._scratch}
        environment.pop(CRASH_VARIABLE, None)
        if crash:
            environment[CRASH_VARIABLE] = crash
        with open(directory / "driver.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.crash.spark_sink", "--drive", address, topic,
                str(directory)],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self, timeout_s: float = DRIVER_TIMEOUT_S) -> int:
        """Its exit status; everything of it is gone then."""
        try:
            return self.process.wait(timeout_s)
        finally:
            self.end()

    def end(self) -> None:
        """Kill what is left of it."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """It, its Java process, and Spark's Python workers."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(
                    process.pid
                ) == self.process.pid or self._scratch in process.environ().get("TMPDIR", ""):
                    found.append(process)
            except (ProcessLookupError, psutil.Error):
                continue
        return found

    def victims(self) -> dict[str, list[psutil.Process]]:
        """By kind, what can be killed now."""
        found: dict[str, list[psutil.Process]] = {"driver": [], "worker": []}
        for process in self.processes():
            try:
                command, name = process.cmdline(), process.name()
            except psutil.Error:
                continue
            if name == "java":
                found["driver"].append(process)
            elif any(part.startswith("pyspark.") for part in command):
                found["worker"].append(process)
        return found


def drive(address: str, topic: str, directory: Path) -> None:
    """The driver: runs the query to the end of its input."""
    from spark_bridge.session import local_session

    with local_session() as spark:
        run_query(spark, address, topic, directory)


class Torture:
    """See the module's docstring."""

    def __init__(self, seed: int, directory: Path, pause_s: float) -> None:
        """`pause_s`: the longest between two kills; a batch or two should fit in."""
        self.pause_s = pause_s
        self.rng = random.Random(seed)
        self.directory = directory
        self.appliance = DisturbedAppliance(random.Random(seed), str(directory / "data"))
        self.kills: Counter[str] = Counter()
        self.files = 0
        self.planned_at_start = 0
        with Admin(self.appliance.address) as admin:
            admin.create_topics(NewTopic(TOPIC, PARTITIONS))

    def add_input(self, count: int) -> None:
        """More batches."""
        for _ in range(count):
            write_input(self.directory / "in", self.files, ROWS)
            self.files += 1

    def kill_one(self, driver: Driver) -> None:
        """A process of the driver's or the appliance's."""
        kind = self.rng.choice(["driver", "worker", "worker", "appliance", "appliance"])
        if kind == "driver" and not self.has_started():
            return  # a driver that is killed while Spark starts says nothing of the sink
        if kind == "appliance":
            harm = self.appliance.harm
            before = harm.kills + harm.restarts
            self.appliance.disturb()
            self.kills["appliance"] += harm.kills + harm.restarts - before
            return
        victims = driver.victims()[kind]
        if victims:
            try:
                self.rng.choice(victims).kill()
                self.kills[kind] += 1
            except psutil.NoSuchProcess:
                pass

    def run(self, kills: int, say: Any = print) -> None:
        """Until so many were killed, and then to the end of the input. Raises AssertionError for a
        row that is missing or twice.
        """
        starts = 0
        while True:
            is_last = sum(self.kills.values()) >= kills
            self.add_input(0 if is_last else 12)
            self.planned_at_start = planned(self.directory)
            driver = Driver(self.appliance.address, TOPIC, self.directory)
            starts += 1
            try:
                ended = threading.Event()
                while (
                    not is_last
                    and driver.process.poll() is None
                    and sum(self.kills.values()) < kills
                ):
                    # A load, not a synchronisation: the pause between two kills. They begin when
                    # the driver has workers, so that batches are written.
                    if driver.victims()["worker"]:
                        ended.wait(self.rng.uniform(0.1, self.pause_s))
                        self.kill_one(driver)
                    ended.wait(0.2)
                status = driver.wait()
            finally:
                driver.end()
            say(
                f"driver {starts} ended with {status}; killed so far {dict(self.kills)}; "
                f"{committed(self.directory)} batches committed of {self.files}",
                flush=True,
            )
            if is_last and status == 0:
                break
        found = counted(self.appliance.address, TOPIC)
        requested = range(self.files * ROWS)
        missing = [n for n in requested if not found[n]]
        twice = {n: count for n, count in found.items() if count > 1}
        say(
            f"{self.files * ROWS} rows in {self.files} batches: {len(missing)} missing, "
            f"{len(twice)} more than once, {sum(self.kills.values())} kills",
            flush=True,
        )
        assert not missing, missing[:10]
        assert not twice, list(twice.items())[:10]
        assert len(found) == len(requested)

    def has_started(self) -> bool:
        """True if the driver has planned a batch."""
        return planned(self.directory) > self.planned_at_start


def start_driver(address: str, topic: str, directory: Path, crash: str = "") -> Driver:
    """See `Driver`."""
    return Driver(address, topic, directory, crash)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drive", nargs=3)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--pause", type=float, default=3.0, help="the longest pause between two kills, s"
    )
    given = parser.parse_args()
    if given.drive:
        address, topic, directory = given.drive
        drive(address, topic, Path(directory))
        return 0
    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="tksink"))
    torture = Torture(given.seed, directory, given.pause)
    try:
        torture.run(given.kills)
    finally:
        torture.appliance.stop()
    shutil.rmtree(directory)
    print(f"seed {given.seed}: {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
