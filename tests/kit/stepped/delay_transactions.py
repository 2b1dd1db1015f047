"""Transactions that cancel and reschedule rows of a `DelayWorld`, under a scripted coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from tailrace.core.schedule.delays import tick_of
from tests.kit.stepped.coordinator import ABORT, COMMIT, PID, Coordinator
from tests.kit.stepped.delays import DelayWorld, Killed, Row
from workers.delays.changing_transaction import ChangingTransaction
from workers.delays.delay_log.ingest import Change


@dataclass(slots=True)
class Open:
    """The open transaction of one transactional id."""

    epoch: int = 0
    number: int = 0
    changed: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """Name -> what the commit makes of the row: (offset, due), None if it is cancelled."""


class DelayTransactions:
    """The transactions of a world."""

    def __init__(self, world: DelayWorld, count: int = 2) -> None:
        self.world = world
        self._coordinator = Coordinator(world.bench)
        self._open = [Open() for _ in range(count)]
        for number in range(count):
            self._coordinator.decide(number + 1, [], [(PID + number, 0)], is_sent=False)
        self._fed = 0
        self.committed_count = self.aborted_count = 0
        self.feed()

    def feed(self) -> None:
        """Feed the worker, if it is another one than before."""
        coordinator, bench = self._coordinator, self.world.bench
        if coordinator.bench is not bench:
            coordinator.bench = bench
            coordinator.attach()
            self._fed = 0
        if self._fed != coordinator.generation:
            self._fed = coordinator.generation
            coordinator.feed()
            self.world.settle()
        coordinator.read()

    def change(self, number: int, row: Row, due_us: int | None) -> None:
        """Cancel or reschedule a row within a transaction."""
        world, one = self.world, self._open[number]
        one.number += 1
        try:
            world.partition.catch_up()
            reservations = world.partition.transactions.reservations
            is_mine = reservations.key_of(row.offset) == (PID + number, one.epoch)
            if is_mine:
                pending = reservations.row_of(row.offset)
            else:
                found = world.partition.row_of(row.offset)
                if found is None:
                    return
                pending = found
            self._append(number, row, due_us, pending)
        except Killed:
            world.restart_scheduler()
            return
        outcomes = world.partition.changes.pop(world.token).outcomes
        if outcomes is None:  # a mark of a new epoch is in the way
            return
        (outcome,) = outcomes
        if outcome is False:  # a mark on the way has closed its tick first
            assert tick_of(row.due_us) <= world.partition._marks.closed_tick
            row.fate = "waits"
            return
        assert not isinstance(outcome, int), "a pending row cannot be reserved"
        row.fate = "reserved"
        one.changed[row.name] = outcome

    def _append(self, number: int, row: Row, due_us: int | None, pending: object) -> None:
        world, one, partition = self.world, self._open[number], self.world.partition
        world.token += 1
        partition.changes[world.token] = Change()
        batches = partition.batches
        change = (
            batches.cancellation(row.offset)
            if due_us is None
            else batches.replacement(pending, due_us, row.offset)
        )
        from workers.delays.store.pending_rows import one_batch, table_of

        rows = one_batch(table_of([batches.replacement(pending, row.due_us, row.offset), change]))
        row.fate = "unknown"  # until the outcome is read
        one.changed.pop(row.name, None)
        key = (PID + number, one.epoch)
        batch = partition.change_batch(rows, world.token, ChangingTransaction(key, one.number))
        world.settle()
        before = world.bench.table.read(1).high_watermark
        copies = 1 + (world.rng.random() < 0.2)
        for _ in range(copies):
            assert partition._send(world.log, batch)
        world.settle()
        assert world.bench.table.read(1).high_watermark == before + 2 * copies
        partition.catch_up()

    def reserved(self, number: int) -> list[Row]:
        """Rows that a transaction has changed."""
        return [self.world.rows[name] for name in self._open[number].changed]

    def end(self, number: int, *, is_committed: bool) -> None:
        """Commit or abort a transaction, and begin the next."""
        world, one = self.world, self._open[number]
        seen = {name for name, _ in world.delivered()}
        assert not seen & one.changed.keys(), "a reserved row was delivered"
        outcome = COMMIT if is_committed else ABORT
        pid = PID + number
        self._coordinator.decide(number + 1, [(pid, one.epoch, outcome)], [(pid, one.epoch + 1)])
        world.settle()
        self._coordinator.read()
        for name, found in one.changed.items():
            row = world.rows[name]
            row.fate = "waits"
            if is_committed and found is None:
                row.fate = "cancelled"
            elif is_committed and found is not None:
                row.offset, row.due_us = found
        self._open[number] = Open(one.epoch + 1)
        self.committed_count += is_committed
        self.aborted_count += not is_committed

    def end_all(self) -> None:
        """End what is open, at random."""
        for number in range(len(self._open)):
            self.end(number, is_committed=self.world.rng.random() < 0.5)
