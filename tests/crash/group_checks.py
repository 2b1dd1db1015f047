"""Notes of the members of `tests.crash.group_torture`, held against what producers had
acknowledged.

Owner: one GroupTorture. Invariants: reads only; each check raises AssertionError with some of the
    records that it is about, and returns what it counted.
"""

from __future__ import annotations

import collections
import contextlib
import pathlib
import sqlite3
from collections.abc import Iterable, Mapping

from tailrace import Consumer, TopicPartition
from tests.crash.group_member import DATABASE, POISON, RETRY_GROUP, TOPIC

Place = tuple[int, int]
"""(partition, offset)"""
Handled = tuple[int, int, str]
"""(partition, offset, value)"""


class GroupChecks:
    """See the module's docstring."""

    def __init__(
        self, directory: pathlib.Path, address: str, acknowledged: Mapping[Place, str]
    ) -> None:
        """`acknowledged`: grows while producers work."""
        self._directory = directory
        self._address = address
        self._acknowledged = acknowledged

    def left(self) -> dict[str, set[Place]]:
        """By kind, what is acknowledged and neither handled nor a dead letter yet."""
        dead = self._dead_letters()
        done = {
            kind: {(p, o) for p, o, _ in self._handled(kind)}
            for kind in ("consumer", "share", "retry")
        }
        done["sql"] = {(p, o) for p, o, _ in self._rows()}
        done["share"] |= dead["share"]
        done["retry"] |= dead["retry"]
        return {kind: self._acknowledged.keys() - places for kind, places in done.items()}

    # ---- what was left behind --------------------------------------------------------------------

    def _notes(self, kind: str) -> list[list[list[str]]]:
        """The lines of each member, in fields; a last line that was cut is left out."""
        found = []
        for path in sorted(self._directory.glob(f"notes-{kind}-*")):
            text = path.read_text()
            found.append([line.split(" ") for line in text[: text.rfind("\n") + 1].splitlines()])
        return found

    def _handled(self, kind: str) -> list[Handled]:
        return [
            (int(f[1]), int(f[2]), f[3])
            for lines in self._notes(kind)
            for f in lines
            if f[0] == "R"
        ]

    def _rows(self) -> list[Handled]:
        with contextlib.closing(
            sqlite3.connect(self._directory / DATABASE, timeout=120)
        ) as database:
            return database.execute("SELECT partition, offset, value FROM results").fetchall()

    def _dead_letters(self) -> dict[str, set[Place]]:
        """By kind of group, where the records were that are dead letters."""
        found: dict[str, set[Place]] = {"share": set(), "retry": set()}
        with Consumer(bootstrap=self._address) as consumer:
            keys = [
                TopicPartition(f"{TOPIC}.dlq", n) for n in consumer.partitions_for(f"{TOPIC}.dlq")
            ]
            consumer.assign(keys)
            consumer.seek_to_beginning()
            ends = consumer.end_offsets(keys)
            while any(consumer.position(key) < end for key, end in ends.items()):
                for record in consumer.poll(1000):
                    headers = {name: (value or b"").decode() for name, value in record.headers}
                    kind = "retry" if headers["dlq.group"] == RETRY_GROUP else "share"
                    found[kind].add((int(headers["dlq.partition"]), int(headers["dlq.offset"])))
        return found

    # ---- checks ----------------------------------------------------------------------------------

    def _times(self, handled: Iterable[Handled]) -> collections.Counter[Place]:
        """Count how often each record was handled. Each was acknowledged."""
        times: collections.Counter[Place] = collections.Counter()
        for partition, offset, value in handled:
            known = self._acknowledged.get((partition, offset))
            assert known == value, (
                f"{partition}/{offset} was acknowledged as {known!r} and handled as {value!r}"
            )
            times[partition, offset] += 1
        return times

    def check_consumers(self) -> tuple[int, int]:
        """(records, how many times more)."""
        times = self._times(self._handled("consumer"))
        missed = self._acknowledged.keys() - times.keys()
        assert not missed, f"missed: {sorted(missed)[:5]} of {len(missed)}"
        for lines in self._notes("consumer"):
            owned: dict[int, int] = {}
            for fields in lines:
                partition = int(fields[1])
                if fields[0] == "A":
                    owned[partition] = int(fields[2])
                elif fields[0] == "V":
                    owned.pop(partition, None)
                else:
                    assert partition in owned, (
                        f"{fields} was handled by a member that does not own the partition"
                    )
                    assert int(fields[2]) == owned[partition], (
                        f"{fields} came where offset {owned[partition]} belongs"
                    )
                    owned[partition] += 1
        return len(times), times.total() - len(times)

    def check_share(self) -> tuple[int, int, int]:
        """(records accepted, how many times more, dead letters)."""
        return self._check_with_dead_letters("share")

    def check_retries(self) -> tuple[int, int, int]:
        """(records handled, how many times more, dead letters). Nothing but poison is a dead
        letter: what is flaky is handled before its retries end.
        """
        found = self._check_with_dead_letters("retry")
        dead = self._dead_letters()["retry"]
        assert dead == self._poison(), (
            f"dead letters that are no poison: {sorted(dead - self._poison())[:5]}"
        )
        return found

    def _check_with_dead_letters(self, kind: str) -> tuple[int, int, int]:
        times, dead = self._times(self._handled(kind)), self._dead_letters()[kind]
        poison = self._poison()
        handled = poison & times.keys()
        assert not handled, f"{kind}: poison was handled: {sorted(handled)[:5]}"
        missed = self._acknowledged.keys() - times.keys() - dead
        assert not missed, (
            f"{kind}: neither handled nor dead: {sorted(missed)[:5]} of {len(missed)}"
        )
        assert poison <= dead, f"{kind}: poison that is no dead letter: {sorted(poison - dead)[:5]}"
        return len(times), times.total() - len(times), len(dead)

    def _poison(self) -> set[Place]:
        return {place for place, value in self._acknowledged.items() if POISON.decode() in value}

    def check_sql(self) -> tuple[int, int, int]:
        """(rows, acknowledged records without one, rows too many): the last two are 0."""
        times = self._times(self._rows())
        missed = self._acknowledged.keys() - times.keys()
        twice = [place for place, count in times.items() if count > 1]
        assert not missed, f"sql: not in the database: {sorted(missed)[:5]} of {len(missed)}"
        assert not twice, (
            f"sql: in the database more than once: {sorted(twice)[:5]} of {len(twice)}"
        )
        return times.total(), len(missed), times.total() - len(times)
