"""The transaction coordinator over a real database, with workers that a test steps by hand.

A worker here keeps what the contract says of one: what is registered, what is open in its log, and
its markers, which become durable when the test flushes them. Its lane is a list.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from appliance.groups.agent.service import GroupService
from appliance.groups.base.assignor_plugins import Assignors
from appliance.groups.base.limits import GroupLimits, TransactionLimits
from appliance.groups.base.messages import GroupFailure, Requester, SessionKey
from appliance.groups.share.share_service import ShareService
from appliance.groups.store.group_store import GroupStore
from appliance.groups.transactions.coordinator import TransactionCoordinator
from appliance.groups.transactions.ids.numbers import Numbers
from shm.messages.transaction_messages import (
    NO_PROGRESS,
    Decision,
    Outcome,
    ProducerEpoch,
    Settled,
    decode_decisions,
)
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError, error_for
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import FakeTopics

SECOND_NS = 1_000_000_000
START_US = 1_700_000_000_000_000


class Fenced(Exception):
    """A worker refuses a batch for good."""


class NotYet(Exception):
    """A worker refuses a batch, which may be repeated."""


@dataclass
class Worker:
    """One worker with one partition."""

    name: str
    is_up: bool = True
    is_fed: bool = False
    exists: bool = True
    lane: list[tuple[str, bytes]] = field(default_factory=list)
    registered: dict[int, tuple[int, dict[int, int]]] = field(default_factory=dict)
    """Id number -> (ordinal, producer id -> epoch)."""
    log: list[tuple[str, int, int]] = field(default_factory=list)
    """(what, producer id, epoch)."""
    durable: int = 0
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(ordinal, length of the log with its markers)."""
    settled: Settled = NO_PROGRESS

    def open_in(self, length: int | None = None) -> dict[int, int]:
        found: dict[int, int] = {}
        for what, producer_id, epoch in self.log[:length]:
            if what == "data":
                found.setdefault(producer_id, epoch)
            else:
                found.pop(producer_id, None)
        return found

    def read(self) -> None:
        """Read the coordinator's lane."""
        while self.lane and self.is_up:
            kind, payload = self.lane.pop(0)
            if kind == "feed":
                self.registered, self.is_fed = {}, False
            elif kind == "fed":
                self.is_fed = True
            else:
                for decision in decode_decisions(payload):
                    self._obey(decision)

    def _obey(self, decision: Decision) -> None:
        for producer_id, epoch, outcome in decision.outcomes:
            if self.open_in().get(producer_id) == epoch:
                self.log.append((Outcome(outcome).name.lower(), producer_id, epoch))
        self.ends.append((decision.ordinal, len(self.log)))
        if (
            decision.id_number
            and decision.ordinal >= self.registered.get(decision.id_number, (0, {}))[0]
        ):
            epochs = {one.producer_id: one.epoch for one in decision.registered}
            self.registered[decision.id_number] = (decision.ordinal, epochs)

    def produce(self, producer_id: int, epoch: int) -> None:
        """Take a batch, or raise Fenced or NotYet."""
        if not self.is_up or not self.is_fed:
            raise NotYet
        known = {p: e for _, epochs in self.registered.values() for p, e in epochs.items()}
        if producer_id not in known or epoch < known[producer_id]:
            self.read()
            known = {p: e for _, epochs in self.registered.values() for p, e in epochs.items()}
            if producer_id not in known or epoch < known[producer_id]:
                raise Fenced
        if epoch > known[producer_id] or self.open_in().get(producer_id, epoch) != epoch:
            raise NotYet
        self.log.append(("data", producer_id, epoch))

    def flush(self) -> None:
        """Make the log durable, and report what is carried out."""
        self.durable = len(self.log)
        done = [ordinal for ordinal, length in self.ends if length <= self.durable]
        self.ends = [end for end in self.ends if end[1] > self.durable]
        if done:
            self.settled = Settled(max(self.settled.ordinal, *done))

    def lose_power(self) -> None:
        self.log = self.log[: self.durable]
        self.kill()

    def kill(self) -> None:
        """The successor starts with what is in the log, and is fed."""
        self.lane, self.ends, self.registered, self.is_fed = [], [], {}, False


class FakeWorkers:
    """`appliance.groups.transactions.decisions.workers.Workers` over lists."""

    def __init__(self, count: int) -> None:
        self.workers = [Worker(f"worker-{index}") for index in range(count)]
        self.unfed = set(range(count))
        self.is_requested = False
        self.shown: list[tuple[int, int]] = []

    def request(self) -> None:
        self.is_requested = True

    def send(self, payloads: Sequence[bytes]) -> None:
        for index, worker in enumerate(self.workers):
            if index not in self.unfed:
                worker.lane += [("decisions", payload) for payload in payloads]

    def is_feed_due(self) -> bool:
        return self.is_requested and bool(self.unfed)

    def feed(self, payloads: Sequence[bytes]) -> None:
        for index in self.unfed:
            lane = [("feed", b""), *(("decisions", one) for one in payloads), ("fed", b"")]
            self.workers[index].lane += lane
        self.unfed = set()

    def _counted(self) -> Iterable[Worker]:
        return [worker for worker in self.workers if worker.exists]

    def settled_through(self) -> int:
        return min((worker.settled.ordinal for worker in self._counted()), default=0)

    def show_progress(self, decided: int, carried_out: int) -> None:
        self.shown.append((decided, carried_out))

    def unfinished(self) -> Collection[int]:
        return {one for worker in self._counted() for one in worker.settled.unfinished}

    def pending_on(self, ordinal: int) -> list[str]:
        return [worker.name for worker in self._counted() if worker.settled.ordinal < ordinal]


class World:
    """The service with its clock, database and workers."""

    def __init__(
        self,
        path: Path,
        workers: int = 2,
        *,
        limits: TransactionLimits | None = None,
        has_block: bool = True,
        with_share: bool = False,
    ) -> None:
        self.path = path / "groups.db"
        self.topics = FakeTopics(orders=4)
        self.limits = limits or TransactionLimits()
        self.with_share = with_share
        self.now_ns = 50 * SECOND_NS
        self.answers: dict[int, tuple[int, dict[str, Any]]] = {}
        self.undone: list[int] = []
        self._correlation = itertools.count(1)
        self._blocks = itertools.count(7)
        self._workers_count = workers
        self.workers = FakeWorkers(workers)
        self.open(has_block=has_block)

    def open(self, *, has_block: bool = True) -> None:
        """Start the process: nothing of its memory is left."""
        self.numbers = Numbers()
        if has_block:
            self.add_block()
        self.store = GroupStore(str(self.path))
        self._serve()
        self.step()

    def add_block(self) -> None:
        self.numbers.add_block(TRANSACTIONAL_PRODUCER_IDS + (next(self._blocks) << 32))

    def _serve(self) -> None:
        limits = GroupLimits()
        made = (self.store, self.topics, limits, 1 << 18, self.now_ns, self.wall_us)
        self.service = GroupService(
            *made,
            share=ShareService(*made) if self.with_share else None,
            assignors=Assignors(()),
            transactions=lambda offsets, times: TransactionCoordinator(
                self.store, offsets, self.workers, self.numbers, self.limits, 1 << 18, self.now_ns,
                times, lambda: self.now_ns
            ),
        )  # fmt: skip
        assert self.service.transactions is not None
        self.coordinator = self.service.transactions
        self.workers.unfed = set(range(self._workers_count))
        self.coordinator.workers_changed()

    def wall_us(self) -> int:
        return START_US + self.now_ns // 1_000

    def kill(self, *, has_block: bool = True) -> None:
        """SIGKILL and restart of the coordinator. Lanes and their messages stay."""
        self.store.close()
        self.open(has_block=has_block)

    def lose_database(self) -> None:
        """The file is gone at the next start."""
        self.store.close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        self.workers.is_requested = False
        self.open()

    def lose_power(self) -> None:
        for worker in self.workers.workers:
            worker.lose_power()
        self.kill()

    def kill_worker(self, index: int) -> None:
        self.workers.workers[index].kill()
        self.workers.unfed.add(index)
        self.step()

    # ---- steps -----------------------------------------------------------------------------------

    def send(self, api: int, session: int = 1, **request: Any) -> int:
        """Give a request to the service; the step goes on. Raises TailraceError."""
        correlation_id = next(self._correlation)
        requester = Requester(*SessionKey(0, session), correlation_id)
        self.service.handle(requester, api, orjson.loads(orjson.dumps(request)), self.now_ns)
        return correlation_id

    def step(self, error: TailraceError | None = None) -> None:
        """Timers, commit, answers. `error`: the commit fails with it."""
        try:
            self.service.step(self.now_ns)
            if error is not None:
                self.service.settle()
                raise error
            self.store.commit()
        except TailraceError as failure:
            self.store.rollback()
            self.service.rolled_back(self.now_ns, failure)
        except GroupFailure as failed:
            self.store.rollback()
            self.service.rolled_back(self.now_ns, TailraceError(str(failed)), failed.group)
        self._drain()

    def _drain(self) -> None:
        for answer in self.service.drain_answers():
            number = answer.requester.correlation_id
            assert number not in self.answers, "a request has one answer"
            if answer.is_undone:
                self.undone.append(number)
            self.answers[number] = (answer.code, orjson.loads(answer.body))

    def settle(self) -> None:
        """Everything is carried out."""
        for _ in range(3):
            self.run_workers()
            self.step()

    def run_workers(self) -> None:
        """Each worker reads its lane, reports, and flushes."""
        for index, worker in enumerate(self.workers.workers):
            if worker.is_up:
                worker.read()
                self.report(index)
                worker.flush()
        self.coordinator.workers_changed()

    def report(self, index: int) -> None:
        """Report the open transactions that are registered, and ask about the others."""
        worker = self.workers.workers[index]
        if not worker.is_fed:
            return
        known = {p: e for _, epochs in worker.registered.values() for p, e in epochs.items()}
        for producer_id, epoch in worker.open_in().items():
            key = ProducerEpoch(producer_id, epoch)
            if known.get(producer_id) == epoch:
                self.coordinator.opened([key], self.now_ns)
            else:
                self.coordinator.asked(index, [key], self.now_ns)

    def ask(self, api: int, session: int = 1, **request: Any) -> dict[str, Any]:
        """One request, and its answer when all is carried out. Raises TailraceError."""
        try:
            number = self.send(api, session, **request)
        except TailraceError:
            self.step()
            raise
        self.step()
        if number not in self.answers:
            self.settle()
        return self.answer(number)

    def answer(self, number: int) -> dict[str, Any]:
        code, body = self.answers[number]
        if code:
            error = error_for(ErrorCode(code), body["message"])
            error.body = body  # type: ignore[attr-defined]
            raise error
        return body

    def wait(self, seconds: float) -> None:
        """Let time pass, in steps as long as the service wants to sleep."""
        end_ns = self.now_ns + int(seconds * SECOND_NS)
        while self.now_ns < end_ns:
            due_ns = self.service.next_deadline_ns()
            self.now_ns = (
                end_ns if due_ns is None else min(end_ns, max(due_ns, self.now_ns + 1_000_000))
            )
            self.step()


class Owner:
    """A producer with a transactional id."""

    def __init__(self, world: World, name: str = "billing", **fields: Any) -> None:
        self.world = world
        self.name = name
        self.fields = {"timeout_ms": 60_000, "client_id": "a", **fields}
        self.producer_id = self.epoch = self.owner = -1
        self.take(world.ask(Api.INIT_TRANSACTIONS, transactional_id=name, **self.fields))

    def take(self, body: dict[str, Any]) -> None:
        self.producer_id, self.epoch = body["producer_id"], body["producer_epoch"]
        self.owner = body.get("owner", self.owner)

    @property
    def current(self) -> tuple[int, int]:
        return self.producer_id, self.epoch

    def write(self, *workers: int) -> None:
        """A batch to the partition of each of these workers, and of all unless any is given."""
        for index in workers or range(len(self.world.workers.workers)):
            self.world.workers.workers[index].produce(*self.current)
            self.world.workers.workers[index].flush()

    def request(self, outcome: str = "commit", **more: Any) -> dict[str, Any]:
        return {
            "transactional_id": self.name, "owner": self.owner, "producer_id": self.producer_id,
            "producer_epoch": self.epoch, "outcome": outcome, **more,
        }  # fmt: skip

    def end(self, outcome: str = "commit", **more: Any) -> dict[str, Any]:
        """End the transaction, and go on with the next one."""
        body = self.world.ask(Api.END_TRANSACTION, **self.request(outcome, **more))
        self.take(body)
        return body


def markers(world: World) -> list[list[str]]:
    """The markers of each worker's log."""
    return [[one[0] for one in w.log if one[0] != "data"] for w in world.workers.workers]


def offsets(world: World, group: str = "g") -> int:
    body = world.ask(Api.FETCH_OFFSETS, group=group, partitions=[["orders", 0]])
    return int(body["offsets"][0][2])


def commit_of(group: str = "g", offset: int = 5, **more: Any) -> dict[str, Any]:
    return {"group": group, "entries": [["orders", 0, offset]], **more}
