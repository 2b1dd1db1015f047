"""Consumers of one group in one process, for `bench.groups`: what each of them owned and read, and when.

`python -P -m bench.group_member ADDRESS GROUP TOPIC CONSUMERS FILE` reads until SIGTERM. Times are of the monotonic clock, the same in all processes. The file
is JSON: `owned` is [[ns, partition, 1 given | 0 taken]], `gaps` is [[partition, begin_ns, end_ns]] between two reads of a partition that was kept, LONG_NS
at least. It is written at the end; for a process that is killed, `owned` goes to FILE.owned, a line at a time.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import TextIO

from tailrace import Consumer, RebalanceListener, TopicPartition
from tailrace.errors import TailraceError

LONG_NS = 100_000_000


class Member(RebalanceListener):
    """One consumer and its thread."""

    def __init__(self, address: str, group: str, topic: str, owned_file: TextIO) -> None:
        self.owned: list[tuple[int, int, int]] = []
        self.gaps: list[tuple[int, int, int]] = []
        self._last: dict[int, int] = {}
        self._file = owned_file
        self._consumer = Consumer(
            bootstrap=address, group_id=group, auto_offset_reset="latest", session_timeout_ms=6_000, heartbeat_interval_ms=1_000,
            enable_auto_commit=True, auto_commit_interval_ms=1_000,
        )  # fmt: skip
        self._consumer.subscribe([topic], listener=self)

    def _note(self, partition: int, given: int) -> None:
        now_ns = time.monotonic_ns()
        self.owned.append((now_ns, partition, given))
        self._last.pop(partition, None)
        print(now_ns, partition, given, file=self._file)

    def on_partitions_assigned(self, partitions: Iterable[TopicPartition]) -> None:
        """Noted."""
        for key in partitions:
            self._note(key.partition, 1)

    def on_partitions_revoked(self, partitions: Iterable[TopicPartition]) -> None:
        """Noted."""
        for key in partitions:
            self._note(key.partition, 0)

    def on_partitions_lost(self, partitions: Iterable[TopicPartition]) -> None:
        """Noted."""
        self.on_partitions_revoked(partitions)

    def run(self, stop: threading.Event) -> None:
        """Until `stop`."""
        with self._consumer as consumer:
            while not stop.is_set():
                try:
                    records = consumer.poll(500)
                except TailraceError as error:
                    if not error.retriable:
                        raise
                    continue
                now_ns = time.monotonic_ns()
                for partition in {record.partition for record in records}:
                    last_ns = self._last.get(partition, now_ns)
                    if now_ns - last_ns >= LONG_NS:
                        self.gaps.append((partition, last_ns, now_ns))
                    self._last[partition] = now_ns


def main() -> None:
    """See the module's docstring."""
    address, group, topic, count, path = sys.argv[1:6]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: a bench that is killed leaves none of them
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with open(f"{path}.owned", "w", buffering=1, encoding="ascii") as file:
        members = [Member(address, group, topic, file) for _ in range(int(count))]
        threads = [threading.Thread(target=member.run, args=(stop,)) for member in members]
        for thread in threads:
            thread.start()
        stop.wait()
        for thread in threads:
            thread.join()
    with open(path, "w", encoding="ascii") as out:
        json.dump({"owned": [o for m in members for o in m.owned], "gaps": [g for m in members for g in m.gaps]}, out)


if __name__ == "__main__":
    main()
