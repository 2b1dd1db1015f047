"""Random kills of members of a consumer group and of a share group, and of the appliance beneath them. `make torture-groups SECONDS=60 SEED=1`.

Checked, from the members' own notes (`tests.crash.group_member`) against what producers had acknowledged:

- consumer group: no acknowledged record is missed; while a member owns a partition it reads it without a gap and without a repetition, from the position that
  it was given on; in the end every partition is committed to its end. A record is handled again only by a member that was given the partition anew: counted.
- share group: every acknowledged record is accepted, or a dead letter; poison is never accepted. A record that is accepted twice was accepted by a member
  that was killed, or lost its connection, before it had the answer: counted.
"""

from __future__ import annotations

import collections
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

from tailrace import Admin, Consumer, NewTopic, Producer, RecordMetadata, TopicPartition
from tailrace.errors import TailraceError
from tests.crash.disturbance import DisturbedAppliance, Harm, run_from_command_line
from tests.crash.group_member import POISON, TOPIC

PARTITIONS = 6
MEMBERS = 3
POISON_EVERY = 500
STALLED_S = 90.0
"""Without anything handled for so long, the run has failed."""
KINDS = ("consumer", "share")


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


@dataclass(slots=True)
class Member:
    """One process that reads."""

    kind: str
    notes: pathlib.Path
    process: subprocess.Popen[bytes]


class GroupTorture:
    """One run."""

    def __init__(self, seed: int, data_dir: str) -> None:
        self._rng = random.Random(seed)
        self._directory = pathlib.Path(data_dir)
        (self._directory / "data").mkdir()
        self.appliance = DisturbedAppliance(random.Random(seed + 1), f"{data_dir}/data", "tr-groups-0")
        self.address = self.appliance.address
        self.counts = Counts(self.appliance.harm)
        self._acknowledged: dict[tuple[int, int], str] = {}
        """(partition, offset) -> value."""
        self._members: list[Member] = []
        self._started = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._errors: list[BaseException] = []

    # ---- load ------------------------------------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        try:
            with Producer(self.address, acks="all", delivery_timeout_ms=120_000, buffer_memory=1 << 20, max_block_ms=600_000) as producer:
                number = 0
                while not self._stop.wait(0.002):
                    value = b"%d%b" % (number, b"-" + POISON if number % POISON_EVERY == POISON_EVERY - 1 else b"")

                    def done(metadata: RecordMetadata | None, error: TailraceError | None, value: bytes = value) -> None:
                        if error is not None:
                            self._errors.append(error)
                        elif metadata is not None and metadata.offset is not None:
                            with self._lock:
                                self._acknowledged[metadata.partition, metadata.offset] = value.decode()

                    producer.send(TOPIC, value, partition=number % PARTITIONS, on_delivery=done)
                    number += 1
                producer.flush(120)
        except BaseException as error:
            self._errors.append(error)

    def _start_member(self, kind: str) -> Member:
        self._started += 1
        notes = self._directory / f"notes-{kind}-{self._started}"
        errors = (self._directory / f"errors-{kind}-{self._started}").open("wb")
        with errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.crash.group_member", kind, self.address, str(notes), str(self._started)], stderr=errors
            )
        return Member(kind, notes, process)

    def _disturb_members(self) -> None:
        """Kill a member now and then, and start another in its place; sometimes somewhat later."""
        try:
            while not self._stop.wait(self._rng.uniform(0.3, 3.0)):
                victim = self._rng.randrange(len(self._members))
                self._check_alive()
                self._members[victim].process.kill()
                self._members[victim].process.wait()
                self.counts.members_killed += 1
                if self._rng.random() < 0.3:
                    self._stop.wait(self._rng.uniform(0.5, 3.0))
                self._members[victim] = self._start_member(self._members[victim].kind)
        except BaseException as error:
            self._errors.append(error)

    def _check_alive(self) -> None:
        for member in self._members:
            if member.process.poll() is not None:
                said = (self._directory / member.notes.name.replace("notes", "errors")).read_text()
                raise AssertionError(f"a member of {member.kind} ended by itself ({member.process.returncode}): {said[-3000:]}")

    # ---- a run -----------------------------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> Counts:
        """Disturb for `seconds`, let the members finish, check. Raises AssertionError."""
        with Admin(self.address) as admin:
            admin.create_topics(
                [
                    NewTopic(TOPIC, PARTITIONS, {"segment.bytes": 1 << 19, "group.share.record.lock.duration.ms": 5000}),
                    NewTopic(f"{TOPIC}.dlq", 1),
                ]
            )
        self._members = [self._start_member(kind) for kind in KINDS for _ in range(MEMBERS)]
        threads = [threading.Thread(target=self._produce), threading.Thread(target=self._disturb_members)]
        for thread in threads:
            thread.start()
        try:
            self.appliance.disturb_for(seconds, lambda: bool(self._errors))
            self._stop.set()
            for thread in threads:
                thread.join()
            if self._errors:
                raise self._errors[0]
            self._let_them_finish()
        finally:
            self._stop.set()
            self._stop_members()
        self._check_consumers()
        self._check_share()
        self.counts.acknowledged = len(self._acknowledged)
        assert self.appliance.stop() == 0
        return self.counts

    def _let_them_finish(self) -> None:
        """Until everything acknowledged was handled by both groups, or nothing more is handled."""
        before, since = -1, time.monotonic()
        while True:
            self._check_alive()
            handled = {kind: {(p, o) for p, o, _ in self._handled(kind)} for kind in KINDS}
            dead = self._dead_letters()
            missing = [len(self._acknowledged.keys() - handled["consumer"]), len(self._acknowledged.keys() - handled["share"] - dead)]
            if missing == [0, 0]:
                return
            if sum(missing) != before:
                before, since = sum(missing), time.monotonic()
            if time.monotonic() - since > STALLED_S:
                lost = (
                    sorted(self._acknowledged.keys() - handled["consumer"])[:5],
                    sorted(self._acknowledged.keys() - handled["share"] - dead)[:5],
                )
                raise AssertionError(f"never handled: {missing} (consumers, share), {lost}; notes in {self._directory}")
            time.sleep(0.5)  # a look at files that others write

    def _stop_members(self) -> None:
        for member in self._members:
            member.process.send_signal(signal.SIGTERM)
        for member in self._members:
            try:
                member.process.wait(60)
            except subprocess.TimeoutExpired:
                member.process.kill()
                raise AssertionError(f"a member of {member.kind} does not end") from None

    # ---- checks ----------------------------------------------------------------------------------------------------------------------

    def _notes(self, kind: str) -> list[list[list[str]]]:
        """Of each member its lines, in fields; a last line that was cut is left out."""
        found = []
        for path in sorted(self._directory.glob(f"notes-{kind}-*")):
            text = path.read_text()
            found.append([line.split(" ") for line in text[: text.rfind("\n") + 1].splitlines()])
        return found

    def _handled(self, kind: str) -> list[tuple[int, int, str]]:
        return [(int(f[1]), int(f[2]), f[3]) for lines in self._notes(kind) for f in lines if f[0] == "R"]

    def _check_values(self, handled: list[tuple[int, int, str]]) -> None:
        for partition, offset, value in handled:
            known = self._acknowledged.get((partition, offset))
            assert known == value, f"{partition}/{offset} was acknowledged as {known!r} and handled as {value!r}"

    def _check_consumers(self) -> None:
        handled = self._handled("consumer")
        self._check_values(handled)
        times = collections.Counter((partition, offset) for partition, offset, _ in handled)
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
                    assert partition in owned, f"{fields} was handled by a member that does not own the partition"
                    assert int(fields[2]) == owned[partition], f"{fields} came where offset {owned[partition]} belongs"
                    owned[partition] += 1
        self.counts.handled = len(times)
        self.counts.handled_again = sum(times.values()) - len(times)

    def _dead_letters(self) -> set[tuple[int, int]]:
        """(partition, offset) of the records that are dead letters."""
        found: set[tuple[int, int]] = set()
        with Consumer(bootstrap=self.address) as consumer:
            key = TopicPartition(f"{TOPIC}.dlq", 0)
            consumer.assign([key])
            consumer.seek_to_beginning()
            end = consumer.end_offsets([key])[key]
            while consumer.position(key) < end:
                for record in consumer.poll(1000):
                    headers = {name: (value or b"").decode() for name, value in record.headers}
                    found.add((int(headers["dlq.partition"]), int(headers["dlq.offset"])))
        return found

    def _check_share(self) -> None:
        accepted = self._handled("share")
        self._check_values(accepted)
        poisoned = [value for _, _, value in accepted if POISON.decode() in value]
        assert not poisoned, poisoned[:5]
        times = collections.Counter((partition, offset) for partition, offset, _ in accepted)
        dead = self._dead_letters()
        missed = self._acknowledged.keys() - times.keys() - dead
        assert not missed, f"neither accepted nor dead: {sorted(missed)[:5]} of {len(missed)}"
        poison = {key for key, value in self._acknowledged.items() if POISON.decode() in value}
        assert poison <= dead, f"poison that is no dead letter: {sorted(poison - dead)[:5]}"
        self.counts.accepted = len(times)
        self.counts.accepted_again = sum(times.values()) - len(times)
        self.counts.dead_letters = len(dead)


def torture(seed: int, seconds: float) -> Counts:
    with tempfile.TemporaryDirectory(prefix="tailrace-groups-", ignore_cleanup_errors=True) as data_dir:
        run = GroupTorture(seed, os.path.realpath(data_dir))
        try:
            return run.run(seconds)
        finally:
            run.appliance.stop()


if __name__ == "__main__":
    sys.exit(run_from_command_line(torture))
