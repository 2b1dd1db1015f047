"""Random kills of members of groups of four kinds, and of the appliance beneath them. `make
torture-groups SECONDS=60 SEED=1`.

Checked (`tests.crash.group_checks`), from what the members leave behind
(`tests.crash.group_member`), against what producers had acknowledged:

- consumer group: no acknowledged record is missed; while a member owns a partition it reads it
  without a gap and without a repetition, from the position that it was given on; in the end every
  partition is committed to its end. A record is handled again only by a member that was given the
  partition anew: counted.
- share group: every acknowledged record is accepted, or a dead letter; poison is never accepted. A
  record that is accepted twice was accepted by a member that was killed, or lost its connection,
  before it had the answer: counted.
- a consumer group whose results go into a SQL database, with its offsets
  (`tailrace.idempotent.SqlSink`): in the database no acknowledged record is missing and none is
  there twice, whatever was killed.
- a consumer group with retries (`retry_later`): every acknowledged record is handled or, poison, a
  dead letter of this group; handled again is counted.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass, field

from tailrace import Admin, NewTopic, Producer, RecordMetadata
from tailrace.core.errors import TailraceError
from tests.crash.disturbance import Harm
from tests.crash.group_checks import GroupChecks
from tests.crash.group_member import DATABASE, FLAKY, POISON, TOPIC
from tests.crash.torture_base import Enough, TortureBase, run_from_command_line, run_torture
from tests.kit.processes import HANG_LIMIT_S

PARTITIONS = 6
MEMBERS = 3
POISON_EVERY = 100
FLAKY_EVERY = 50
KINDS = ("consumer", "share", "sql", "retry")


@dataclass(slots=True)
class Counts:
    harm: Harm = field(default_factory=Harm)
    members_killed: int = 0
    acknowledged: int = 0
    handled: int = 0
    handled_again: int = 0
    accepted: int = 0
    accepted_again: int = 0
    dead_letters: int = 0
    sql_rows: int = 0
    sql_missed: int = 0
    sql_twice: int = 0
    retry_handled: int = 0
    retry_handled_again: int = 0
    retry_dead_letters: int = 0


@dataclass(slots=True)
class Member:
    """One process that reads."""

    kind: str
    notes: pathlib.Path
    process: subprocess.Popen[bytes]


class GroupTorture(TortureBase[Counts]):
    """One run."""

    def __init__(self, seed: int, directory: str, members: int = MEMBERS) -> None:
        """`members`: of each kind."""
        self._rng = random.Random(seed)
        self._directory = pathlib.Path(os.path.realpath(directory))
        (self._directory / "data").mkdir()
        counts = Counts()
        super().__init__(
            counts, counts.harm, seed + 1, str(self._directory / "data"), "tr-groups-0"
        )
        self._acknowledged: dict[tuple[int, int], str] = {}
        """(partition, offset) -> value."""
        self._checks = GroupChecks(self._directory, self.address, self._acknowledged)
        self._members_each = members
        self._members: list[Member] = []
        self._started = 0

    # ---- load ------------------------------------------------------------------------------------

    def _produce(self) -> None:
        with Producer(
            self.address,
            acks="all",
            delivery_timeout_ms=600_000,
            buffer_memory=1 << 20,
            max_block_ms=600_000,
        ) as producer:
            number = 0
            while not self._stop.wait(0.002):
                kind = (
                    b"-" + POISON
                    if number % POISON_EVERY == 49
                    else b"-" + FLAKY
                    if number % FLAKY_EVERY == 7
                    else b""
                )
                value = b"%d%b" % (number, kind)

                def done(
                    metadata: RecordMetadata | None,
                    error: TailraceError | None,
                    value: bytes = value,
                ) -> None:
                    if error is not None:
                        self._errors.append(error)
                    elif metadata is not None and metadata.offset is not None:
                        with self._lock:
                            self._acknowledged[metadata.partition, metadata.offset] = value.decode()
                            self.counts.acknowledged = len(self._acknowledged)

                producer.send(TOPIC, value, partition=number % PARTITIONS, on_delivery=done)
                number += 1
            producer.flush(600)

    def _start_member(self, kind: str) -> Member:
        self._started += 1
        notes = self._directory / f"notes-{kind}-{self._started}"
        errors = (self._directory / f"errors-{kind}-{self._started}").open("wb")
        with errors:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "tests.crash.group_member",
                    kind,
                    self.address,
                    str(notes),
                    str(self._started),
                ],
                stderr=errors,
            )
        return Member(kind, notes, process)

    def _disturb_members(self) -> None:
        """Kill a member now and then, and start another in its place; sometimes somewhat later."""
        while not self._stop.wait(self._rng.uniform(0.3, 3.0)):
            victim = self._rng.randrange(len(self._members))
            self._check_alive()
            self._members[victim].process.kill()
            self._members[victim].process.wait()
            self.counts.members_killed += 1
            if self._rng.random() < 0.3:
                self._stop.wait(self._rng.uniform(0.5, 3.0))
            self._members[victim] = self._start_member(self._members[victim].kind)

    def _check_alive(self) -> None:
        for member in self._members:
            if member.process.poll() is not None:
                said = (self._directory / member.notes.name.replace("notes", "errors")).read_text()
                raise AssertionError(
                    f"a member of {member.kind} ended by itself ({member.process.returncode}): "
                    f"{said[-3000:]}"
                )

    # ---- a run -----------------------------------------------------------------------------------

    def run(self, enough: Enough[Counts]) -> Counts:
        """Disturb until `enough`, let the members finish, check. Raises AssertionError."""
        with Admin(self.address) as admin:
            admin.create_topics(
                [
                    NewTopic(
                        TOPIC,
                        PARTITIONS,
                        {"segment.bytes": 1 << 19, "group.share.record.lock.duration.ms": 5000},
                    ),
                    NewTopic(f"{TOPIC}.dlq", 1),
                ]
            )
        with sqlite3.connect(self._directory / DATABASE) as database:
            database.execute("CREATE TABLE results (partition INTEGER, offset INTEGER, value TEXT)")
        database.close()
        self._members = [
            self._start_member(kind) for kind in KINDS for _ in range(self._members_each)
        ]
        try:
            loads = [self.thread(self._produce), self.thread(self._disturb_members)]
            self.disturb(enough, [*loads, self.thread(self.alter_settings, [TOPIC])])
            self._let_them_finish()
        finally:
            self._stop_members()
        counts, checks = self.counts, self._checks
        counts.acknowledged = len(self._acknowledged)
        counts.handled, counts.handled_again = checks.check_consumers()
        counts.accepted, counts.accepted_again, counts.dead_letters = checks.check_share()
        counts.sql_rows, counts.sql_missed, counts.sql_twice = checks.check_sql()
        counts.retry_handled, counts.retry_handled_again, counts.retry_dead_letters = (
            checks.check_retries()
        )
        assert self.appliance.stop() == 0
        return self.counts

    def _let_them_finish(self) -> None:
        """Until everything acknowledged was handled by all groups, or nothing more is handled."""
        before, since = -1, time.monotonic()
        while True:
            self._check_alive()
            left = self._checks.left()
            if not any(left.values()):
                return
            count = sum(map(len, left.values()))
            if count != before:
                before, since = count, time.monotonic()
            if time.monotonic() - since > HANG_LIMIT_S:
                lost = {kind: sorted(places)[:5] for kind, places in left.items()}
                raise AssertionError(f"never handled, by kind: {lost}; notes in {self._directory}")
            time.sleep(0.5)  # a look at files that others write

    def _stop_members(self) -> None:
        for member in self._members:
            member.process.send_signal(signal.SIGTERM)
        for member in self._members:
            try:
                member.process.wait(HANG_LIMIT_S)
            except subprocess.TimeoutExpired:
                member.process.kill()
                raise AssertionError(f"a member of {member.kind} does not end") from None


def torture(seed: int, enough: Enough[Counts], members: int = MEMBERS) -> Counts:
    return run_torture(lambda directory: GroupTorture(seed, directory, members), enough)


if __name__ == "__main__":
    sys.exit(run_from_command_line(torture))
