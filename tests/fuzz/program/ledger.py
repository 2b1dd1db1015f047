"""The world of a fuzzed program's transactions: their topics, and readers of committed records.

Owner: one ProgramRun (`tests.fuzz.program.run`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.core.errors import TailraceError
from tests.fuzz.program.model import expect
from tests.fuzz.program.transaction_model import Outcome
from tests.fuzz.program.transactions import (
    GROUP,
    INPUT_COUNT,
    INPUTS,
    LEDGER,
    LEDGER_PARTITIONS,
)
from tests.fuzz.program.world import World

READ_S = 60.0


class LedgerRun(World):
    """See the module's docstring."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._admin = Admin(self.address)
        self._has_ledger = False

    def _try(self, call: Callable[[], Any]) -> Any:
        """A call of an administrator, made again while processes come back."""
        while True:
            try:
                return call()
            except TailraceError as error:
                if not (self.kill_count and error.retriable):
                    raise

    # ---- transactions ----------------------------------------------------------------------------

    def make_ledger(self) -> None:
        if self._has_ledger:
            return
        self._has_ledger = True
        for name, count in ((LEDGER, LEDGER_PARTITIONS), (INPUTS, 1)):
            with contextlib.suppress(*(() if not self.kill_count else (TailraceError,))):
                self._try(partial(self._admin.create_topics, NewTopic(self.name(name), count)))
        with Producer(self.address) as producer:
            for number in range(INPUT_COUNT):
                producer.send(self.name(INPUTS), b"%d" % number)

    def _reader_of_committed(self) -> Consumer:
        reader = Consumer(
            bootstrap=self.address,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            fetch_max_wait_ms=50,
        )
        name = self.name(LEDGER)
        reader.assign([TopicPartition(name, number) for number in range(LEDGER_PARTITIONS)])
        return reader

    def _read_committed(self) -> None:
        """Check that all that a reader of committed records finds now was committed."""
        if self._has_ledger:
            with self._reader_of_committed() as reader:
                while records := reader.poll(60):
                    for record in records:
                        self.ledger.sees(record.value)

    def _check_transactions(self) -> None:
        """Decide what is prepared, and read everything: nothing is left open."""
        if not self._has_ledger:
            return
        for name, transaction in list(self.ledger.prepared.items()):
            commits = len(transaction.tag) % 2 == 1
            decide = self._admin.commit_transaction if commits else self._admin.abort_transaction
            self._try(partial(decide, name))
            self.ledger.ends(transaction, Outcome.COMMITTED if commits else Outcome.ABORTED)
        found: dict[int, list[bytes]] = {number: [] for number in range(LEDGER_PARTITIONS)}
        deadline = time.monotonic() + READ_S
        with (
            self._reader_of_committed() as reader,
            Consumer(bootstrap=self.address, isolation_level="read_uncommitted") as other,
        ):
            ends = other.end_offsets(reader.assignment())
            while any(reader.position(key) < end for key, end in ends.items()):
                where = {key.partition: reader.position(key) for key in ends}
                expect(time.monotonic() < deadline, f"a transaction hangs: {where} of {ends}")
                for record in reader.poll(200):
                    found[record.partition].append(record.value)
        key = TopicPartition(self.name(INPUTS), 0)
        offsets = self._try(lambda: self._admin.list_group_offsets(self.name(GROUP), [key]))
        self.ledger.check(found, int(offsets[key] or 0))
