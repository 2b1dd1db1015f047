"""Notes of a group's members, and the figures that follow from them when one member dies.

Owner: each process of members appends to a file of its own; `bench.members.rebalance` reads them
    all. Used alike for our members and Kafka's.
Invariants: a note is one line, written at once: `NS MEMBER PARTITION KIND`. NS is of the monotonic
    clock, the same in all processes. KIND is `+` (given to the member), `-` (taken from it) or `r`
    (the member has read from it).
Crash: a member that is killed leaves its notes as they were; a line that is not whole yet is not
    read.
"""

from __future__ import annotations

import math
import os
import pathlib
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise

SESSION_TIMEOUT_MS = 6_000
HEARTBEAT_INTERVAL_MS = 1_000
AUTO_COMMIT_INTERVAL_MS = 1_000
POLL_MS = 500
"""Time that a member's poll waits. Members of all contenders have these settings."""


class Notes:
    """The notes of one member."""

    def __init__(self, file: int, member: str) -> None:
        self._file, self._member = file, member

    def _note(self, partitions: Iterable[int], kind: str) -> None:
        now_ns = time.monotonic_ns()
        text = "".join(f"{now_ns} {self._member} {partition} {kind}\n" for partition in partitions)
        os.write(
            self._file, text.encode()
        )  # one call: the members of a process are threads that share the file

    def given(self, partitions: Iterable[int]) -> None:
        """These are the member's now."""
        self._note(partitions, "+")

    def taken(self, partitions: Iterable[int]) -> None:
        """These are the member's no longer."""
        self._note(partitions, "-")

    def read(self, partitions: Iterable[int]) -> None:
        """Records of these have come."""
        self._note(partitions, "r")


def run_members(count: int, path: str, run: Callable[[Notes], None]) -> None:
    """`run` in `count` threads, each with notes of its own, until the process is killed; a thread
    that ends by an exception ends the process.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    ended = threading.Event()

    def one(number: int) -> None:
        try:
            run(Notes(file, f"{os.path.basename(path)}.{number}"))
        finally:
            ended.set()

    for number in range(count):
        threading.Thread(target=one, args=(number,), daemon=True).start()
    ended.wait()
    time.sleep(0.5)  # until the exception is printed
    os._exit(1)


class History:
    """All notes together."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._changes: dict[int, list[tuple[int, str, str]]] = {}
        """partition -> [(ns, kind, member)]"""
        self._reads: dict[int, list[tuple[int, str]]] = {}
        """partition -> [(ns, member)]"""
        for text in texts:
            for line in text[: text.rfind("\n") + 1].splitlines():
                ns, member, partition, kind = line.split(" ")
                if kind == "r":
                    self._reads.setdefault(int(partition), []).append((int(ns), member))
                else:
                    self._changes.setdefault(int(partition), []).append((int(ns), kind, member))
        for changes in self._changes.values():
            changes.sort()
        for reads in self._reads.values():
            reads.sort()

    def owners(self, at_ns: float = math.inf) -> dict[int, set[str]]:
        """partition -> who had it then. A member that died has still what it had."""
        found: dict[int, set[str]] = {}
        for partition, changes in self._changes.items():
            owners: set[str] = set()
            for ns, kind, member in changes:
                if ns <= at_ns:
                    (owners.add if kind == "+" else owners.discard)(member)
            found[partition] = owners
        return found

    def settled_ns(self, partition_count: int, member_count: int) -> int | None:
        """Time of the last change, if each partition has one owner now and each member a partition;
        else None.
        """
        owners = self.owners()
        if len(owners) < partition_count or any(len(members) != 1 for members in owners.values()):
            return None
        if len(set().union(*owners.values())) < member_count:
            return None
        return max(changes[-1][0] for changes in self._changes.values())

    def until_reassigned_ms(
        self, partitions: Collection[int], dead: str, died_ns: int, end_ns: int
    ) -> float:
        """From the death of their owner until the last of them was given to another member;
        infinite if that was not before `end_ns`.
        """

        def given_ns(partition: int) -> float:
            given = (
                ns
                for ns, kind, member in self._changes[partition]
                if kind == "+" and member != dead and died_ns < ns < end_ns
            )
            return next(given, math.inf)

        return max((given_ns(partition) - died_ns) / 1e6 for partition in partitions)

    def until_resumed_ms(
        self, partitions: Collection[int], dead: str, died_ns: int, end_ns: int
    ) -> float:
        """The same until another member has read from each of them."""

        def read_ns(partition: int) -> float:
            read = (
                ns
                for ns, member in self._reads.get(partition, [])
                if member != dead and died_ns < ns < end_ns
            )
            return next(read, math.inf)

        return max((read_ns(partition) - died_ns) / 1e6 for partition in partitions)

    def read_since_given_ns(self, partitions: Iterable[int]) -> int | None:
        """Time at which the last of them had been read from since its last change; None while one
        has not.
        """
        last_ns = 0
        for partition in partitions:
            given_ns = self._changes[partition][-1][0]
            read_ns = next((ns for ns, _ in self._reads.get(partition, []) if ns > given_ns), None)
            if read_ns is None:
                return None
            last_ns = max(last_ns, read_ns)
        return last_ns

    def changed(self, begin_ns: int, end_ns: int) -> set[int]:
        """Partitions that were given or taken in between."""
        return {
            partition
            for partition, changes in self._changes.items()
            if any(begin_ns < ns < end_ns for ns, _, _ in changes)
        }

    def longest_gap_ms(self, partitions: Iterable[int], begin_ns: int, end_ns: int) -> float:
        """The longest time without a read of one of these partitions, of those that touch [begin,
        end] and as far as they lie before `end_ns`.
        """
        longest_ns = 0
        for partition in partitions:
            reads = [ns for ns, _ in self._reads.get(partition, []) if ns < end_ns]
            # The gap in which the time begins is taken whole; a partition that was never read has
            # none that began earlier.
            times = [*(reads[max(0, bisect_left(reads, begin_ns) - 1) :] or [begin_ns]), end_ns]
            longest_ns = max(longest_ns, *(after - before for before, after in pairwise(times)))
        return longest_ns / 1e6


def read_notes(directory: pathlib.Path) -> History:
    """Read the notes of all files of a directory."""
    return History(path.read_text(encoding="ascii") for path in directory.iterdir())
