"""Random kills of real processes while records are delayed, cancelled and rescheduled, within
transactions too: each comes once, none early. `make torture-delays SECONDS=60 SEED=1`.

Transactional programs send delayed records, and cancel and reschedule others, in many short
transactions that they commit or abort. What an aborted one has sent never comes, and what it has
cancelled does.

`tests.crash.disturbance` does its work meanwhile, on the scheduler as often as on all others
together. One record in five is delayed long enough to lie in a bucket file first.

With an odd seed the topic is typed, and its schema is altered every few seconds: a column is
renamed, another one widened, one comes with a default and one goes. Programs send rows of present
and earlier versions. Each row comes in the columns of the topic's present version.
"""

from __future__ import annotations

import datetime as dt
import math
import random
import sys
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tailrace import (
    Admin,
    Consumer,
    NewTopic,
    Producer,
    Record,
    RecordFuture,
    RecordMetadata,
    TopicPartition,
)
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tests.crash.disturbance import Harm
from tests.crash.torture_base import Enough, TortureBase, run_from_command_line, run_torture
from tests.kit.processes import HANG_LIMIT_S

TOPIC = "later"
PARTITIONS = 3
TRANSACTIONAL = 3
"""Programs that send and change delayed records in transactions, in a long run."""
DELAY_MAX_S = 6.0
FAR_S = 25.0
AT_ONCE_S = 0.05
BACKLOG_MAX = 6_000
"""Number of records that are sent and have not come, three times what is usual, from which programs
and faults wait. On a busy machine a scheduler would else be killed over and over before it has
read all that is pending.
"""
QUIET_S = 3.0
"""So long something is waited for that must not come."""


@dataclass(slots=True)
class Counts:
    harm: Harm = field(default_factory=Harm)
    scheduled: int = 0
    cancelled: int = 0
    rescheduled: int = 0
    too_late: int = 0
    unknown: int = 0
    """Changes of which nobody has heard what became."""
    committed: int = 0
    aborted: int = 0
    """Transactions with delayed records."""
    delivered: int = 0
    altered: int = 0
    """Alterations of the topic's schema."""


def schema_of(version: int) -> pa.Schema:
    """The columns of one version of the topic."""
    columns = [
        pa.field("name", pa.utf8()),
        pa.field(
            f"n{version % 2}",
            pa.int32() if version < 2 else pa.int64(),
            metadata={"tailrace.alias": f"n{(version + 1) % 2}"} if version else None,
        ),
        *(
            pa.field(f"c{number}", pa.int64(), metadata={"tailrace.default": str(number)})
            for number in (version, version - 1)
            if number >= 0
        ),
    ]
    return pa.schema(columns[:: -1 if version % 3 else 1])


def row_of(value: bytes, version: int) -> dict[str, Any]:
    """A row that a program of this version sends."""
    return {
        "name": value.decode(),
        f"n{version % 2}": zlib.crc32(value) >> 1,
        f"c{version}": version,
    }


def value_of(row: dict[str, Any]) -> bytes:
    """The name in a row of any version. Raises AssertionError if another column has not its
    value.
    """
    value = bytes(row["name"].encode())
    numbers = {name: number for name, number in row.items() if name != "name"}
    version = max(int(name[1:]) for name in numbers if name[0] == "c")
    assert numbers.keys() | {"name"} == set(schema_of(version).names), row
    for name, number in numbers.items():
        assert number == (int(name[1:]) if name[0] == "c" else zlib.crc32(value) >> 1), row
    return value


@dataclass(slots=True)
class Sent:
    """One delayed record."""

    due: float
    delay_id: str = ""
    fate: str = "sent"
    """sent, waits (acknowledged, committed), reserved (changed by an open transaction), aborted,
    cancelled, unknown.
    """
    history: list[str] = field(default_factory=list)
    """Requests and their responses; printed when a response does not come."""

    def note(self, what: object) -> None:
        """Add to the history."""
        self.history.append(f"{time.time() - self.due:+.3f} s: {what}")


Sending = tuple[Sent, RecordFuture]
Changed = tuple[Sent, dt.datetime | None, str | None]
"""A record that a transaction has changed: its new due time and id, None if it is cancelled."""


class DelayTorture(TortureBase[Counts]):
    """One run."""

    def __init__(
        self, seed: int, data_dir: str, far_s: float = FAR_S, programs: int = TRANSACTIONAL
    ) -> None:
        """`far_s`: the longest delay; the end of a run waits for it. `programs`: transactional
        ones.
        """
        counts = Counts()
        super().__init__(counts, counts.harm, seed, data_dir, "tr-scheduler-0")
        self._seed = seed
        self.sent: dict[bytes, Sent] = {}
        self.seen: list[tuple[bytes, float]] = []
        self._far_s = far_s
        self._programs = programs
        self._looked_at = 0.0
        self._missing_count = 0
        """Records that are sent and have not come, as of that look."""
        self._is_typed = seed % 2 == 1

    def is_behind(self) -> bool:
        return self._missing_count > BACKLOG_MAX

    def _row(self, value: bytes, rng: random.Random) -> Any:
        """A record's value, as a program of the present version or an earlier one sends it."""
        if not self._is_typed:
            return value
        return row_of(value, max(0, self.counts.altered - rng.choice((0, 0, 1, 3))))

    def _alter(self) -> None:
        with Admin(self.address, request_timeout_ms=20_000) as admin:
            while not self._stop.wait(2):
                try:
                    admin.alter_topics(schema={TOPIC: schema_of(self.counts.altered + 1)})
                except TailraceError as error:
                    if not error.retriable:
                        raise
                else:
                    self.counts.altered += 1

    def _produce(self, name: str, seed: int) -> None:
        rng, number = random.Random(seed), 0
        with Producer(
            self.address,
            acks="all",
            delivery_timeout_ms=600_000,
            buffer_memory=1 << 20,
            max_block_ms=600_000,
        ) as producer:
            while not self._stop.wait(0.004):
                if self.is_behind():
                    continue
                value = f"{name}-{number}".encode()
                number += 1
                delay_s = rng.uniform(
                    0, rng.choice((AT_ONCE_S, DELAY_MAX_S, DELAY_MAX_S, DELAY_MAX_S, self._far_s))
                )
                due = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=delay_s)
                record = self.sent[value] = Sent(due.timestamp())

                def done(
                    metadata: RecordMetadata | None,
                    error: TailraceError | None,
                    record: Sent = record,
                ) -> None:
                    if error is not None:
                        self._errors.append(error)
                    elif metadata is not None and metadata.delay_id is not None:
                        record.delay_id, record.fate = metadata.delay_id, "waits"
                        record.note(metadata.delay_id)
                        self.counts.scheduled += 1

                producer.send(
                    TOPIC, self._row(value, rng), key=value, deliver_at=due, on_delivery=done
                )
            producer.flush(600)

    def _change(self) -> None:
        rng = random.Random(99)
        while not self._stop.wait(0.05):
            with self._lock:
                waiting = [
                    record for record in list(self.sent.values())[-1500:] if record.fate == "waits"
                ]
            if not waiting:
                continue
            record = rng.choice(waiting)
            try:
                with Admin(self.address, request_timeout_ms=20_000) as admin:
                    self._change_one(admin, record, rng)
            except TailraceError as error:
                record.note(repr(error))
                record.fate = "unknown"  # the scheduler was killed, or the appliance
                self.counts.unknown += 1

    def _change_one(self, admin: Admin, record: Sent, rng: random.Random) -> None:
        delay_id = record.delay_id  # a transaction may change it meanwhile
        if rng.random() < 0.5:
            error = admin.cancel_delays([delay_id])[delay_id]
            record.note(f"cancel {delay_id}: {error!r}")
            if error is None:
                record.fate = "cancelled"
                self.counts.cancelled += 1
            else:
                self._was_late(record)
            return
        due = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=rng.uniform(0, DELAY_MAX_S))
        found = admin.reschedule_delays({delay_id: due})[delay_id]
        record.note(f"reschedule {delay_id} to {due}: {found!r}")
        if isinstance(found, str):
            record.delay_id, record.due = found, due.timestamp()
            self.counts.rescheduled += 1
        else:
            self._was_late(record)

    def _transact(self, program: int) -> None:
        rng, number = random.Random(f"transactions {self._seed} {program}"), 0
        with Producer(
            self.address, transactional_id=f"delays-{program}", transaction_timeout_ms=600_000,
            max_block_ms=600_000, delivery_timeout_ms=600_000,
        ) as producer:  # fmt: skip
            producer.init_transactions(600)
            while not self._stop.wait(0.02):
                number += 1
                producer.begin_transaction()
                is_kept = rng.random() < 0.6
                sent = self._send_some(producer, rng, f"t{program}-{number}")
                changed: list[Changed] = []
                try:
                    self._change_some(producer, rng, changed)
                    if is_kept:
                        producer.commit_transaction(600)
                except TailraceError as error:
                    if error.code is not ErrorCode.TRANSACTION_ABORTED and not error.retriable:
                        raise
                    is_kept = False
                if not is_kept:
                    producer.abort_transaction(600)
                self._ended(sent, changed, is_kept=is_kept)

    def _send_some(self, producer: Producer, rng: random.Random, name: str) -> list[Sending]:
        found = []
        for part in range(rng.randint(1, 3)):
            value = f"{name}-{part}".encode()
            delay_s = rng.uniform(0, rng.choice((AT_ONCE_S, DELAY_MAX_S)))
            due = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=delay_s)
            record = self.sent[value] = Sent(due.timestamp())
            sent = producer.send(TOPIC, self._row(value, rng), key=value, deliver_at=due)
            found.append((record, sent))
        return found

    def _change_some(self, producer: Producer, rng: random.Random, changed: list[Changed]) -> None:
        with self._lock:
            waiting = [
                record for record in list(self.sent.values())[-1500:] if record.fate == "waits"
            ]
            chosen = rng.sample(waiting, min(len(waiting), rng.randint(0, 3)))
            for record in chosen:
                record.fate = "unknown"  # until the call returns
        for record in chosen:
            due, delay_id = None, record.delay_id  # which the other thread may change meanwhile
            if rng.random() < 0.5:
                due = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=rng.uniform(0, DELAY_MAX_S))
            if due is None:
                outcome: object = producer.cancel_delays(delay_id)[delay_id]
            else:
                outcome = producer.reschedule_delays({delay_id: due})[delay_id]
            record.note(f"in a transaction, {delay_id} to {due}: {outcome!r}")
            if isinstance(outcome, TailraceError):
                self.counts.too_late += 1  # delivered, or in delivery
            else:
                record.fate = "reserved"
                changed.append((record, due, outcome if isinstance(outcome, str) else None))

    def _ended(self, sent: list[Sending], changed: list[Changed], *, is_kept: bool) -> None:
        with self._lock:
            self.counts.committed += is_kept
            self.counts.aborted += not is_kept
            for record, future in sent:
                if is_kept:
                    record.delay_id = str(future.result(HANG_LIMIT_S).delay_id)
                    record.note(record.delay_id)
                record.fate = "waits" if is_kept else "aborted"
                self.counts.scheduled += is_kept
            for record, due, new_id in changed:
                record.note(f"the transaction is kept: {is_kept}")
                if record.fate != "reserved":
                    continue  # another change of it has no outcome that is known
                if is_kept and due is None:
                    record.fate = "cancelled"
                    self.counts.cancelled += 1
                    continue
                record.fate = "waits"
                if is_kept and due is not None and new_id is not None:
                    record.delay_id, record.due = new_id, due.timestamp()
                    self.counts.rescheduled += 1

    def _was_late(self, record: Sent) -> None:
        """It is delivered; or an earlier try of the same request was carried out, and its answer
        was lost with a front: clients try again.
        """
        record.fate = "unknown"
        self.counts.too_late += 1

    def _consume(self, consumer: Consumer) -> int:
        try:
            records = consumer.poll(200)
        except TailraceError as error:
            if not error.retriable:
                raise
            return 0
        now = time.time()
        self.seen += [(self._value(record), now) for record in records]
        return len(records)

    def _value(self, record: Record) -> bytes:
        return value_of(record.value) if self._is_typed else record.value or b""

    def _keep_consuming(self) -> None:
        with Consumer(bootstrap=self.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition(TOPIC, p) for p in range(PARTITIONS)])
            while not self._stop.is_set():
                self._consume(consumer)
                overdue, value = self._longest_overdue()
                assert overdue < HANG_LIMIT_S, (
                    f"{value!r} was due {overdue:.0f} s ago and has not come: "
                    f"{self.sent[value].history}; {len(self._missing())} are not there"
                )
            deadline, quiet_until = time.monotonic() + self._far_s + HANG_LIMIT_S, math.inf
            while time.monotonic() < quiet_until:
                self._consume(consumer)
                assert time.monotonic() < deadline, (
                    f"never came, of {len(self._missing())}: "
                    f"{[(one, self.sent[one].history) for one in self._missing()[:5]]}"
                )
                if quiet_until == math.inf and not self._missing():
                    quiet_until = time.monotonic() + QUIET_S

    def _longest_overdue(self) -> tuple[float, bytes]:
        """(seconds, record); looked at now and then."""
        now = time.time()
        if now < self._looked_at + 5:
            return 0.0, b""
        self._looked_at = now
        seen = {value for value, _ in self.seen}
        waiting = [
            (now - record.due, value)
            for value, record in self.sent.copy().items()
            if record.fate == "waits" and value not in seen
        ]
        self._missing_count = len(waiting)
        return max(waiting, default=(0.0, b""))

    def _missing(self) -> list[bytes]:
        seen = {value for value, _ in self.seen}
        return [
            value
            for value, record in self.sent.copy().items()
            if record.fate == "waits" and value not in seen
        ]

    def run(self, enough: Enough[Counts]) -> Counts:
        configs = {"delay.enabled": True, "segment.bytes": 1 << 19}
        schema = schema_of(0) if self._is_typed else None
        with Admin(self.address) as admin:
            admin.create_topics([NewTopic(TOPIC, PARTITIONS, configs, schema=schema)])
        threads = [self.thread(self._produce, f"p{n}", n) for n in range(2)]
        threads += [self.thread(self._alter)] if self._is_typed else []
        threads += [self.thread(self._transact, n) for n in range(self._programs)]
        threads += [] if self._is_typed else [self.thread(self.alter_settings, [TOPIC])]
        self.disturb(
            enough, [*threads, self.thread(self._change), self.thread(self._keep_consuming)]
        )
        self._check()
        assert self.appliance.stop() == 0
        return self.counts

    def _check(self) -> None:
        twice = [
            value for value, count in Counter(value for value, _ in self.seen).items() if count > 1
        ]
        assert not twice, f"delivered twice: {twice[:5]} of {len(twice)}"
        for value, at in self.seen:
            record = self.sent[value]
            assert record.fate not in ("cancelled", "aborted"), f"{value!r} was {record.fate}"
            assert record.fate == "unknown" or at >= record.due, (
                f"{value!r} came {record.due - at:.3f} s early"
            )
        assert not self._missing()
        self.counts.delivered = len(self.seen)


def torture(
    seed: int, enough: Enough[Counts], far_s: float = FAR_S, programs: int = TRANSACTIONAL
) -> Counts:
    """Run until `enough`. Raises AssertionError when a promise is broken."""
    return run_torture(lambda data_dir: DelayTorture(seed, data_dir, far_s, programs), enough)


if __name__ == "__main__":
    sys.exit(run_from_command_line(torture))
