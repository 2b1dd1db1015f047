"""Random schedules of two owners, two workers and the coordinator: requests that are late, lost and
repeated, kills, losses of power, failed commits, timeouts and operators.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from appliance.groups.transactions import step
from appliance.groups.transactions.decisions.decision_log import DecisionLog
from tailrace.core.errors import DiskFullError, TailraceError
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import SECOND_NS, Fenced, NotYet, World
from tests.kit.matrices import short

STEPS = 400
NAME = "billing"


class Client:
    """A producer that may lose answers, and repeats its requests until they are answered."""

    def __init__(self, run: Run, name: str) -> None:
        self.run = run
        self.name = name
        self.state = "off"
        self.current: tuple[int, int] = (0, 0)
        self.owner = 0
        self.acked: set[int] = set()
        self.request: dict[str, Any] = {}
        self.number = -1

    def act(self) -> None:
        rng, world = self.run.rng, self.run.world
        if self.state in ("off", "init") and self.number < 0:
            if self.state == "off" and rng.random() < 0.7:
                return
            self.state = "init"
            self.number = world.send(
                Api.INIT_TRANSACTIONS, transactional_id=NAME, timeout_ms=20_000, client_id=self.name
            )
        elif self.state == "open":
            if rng.random() < 0.6:
                self._write(rng.randrange(2))
            else:
                self._end("commit" if rng.random() < 0.7 else "abort")
        elif self.state == "ending" and self.number < 0:
            self._send()

    def _write(self, index: int) -> None:
        worker = self.run.world.workers.workers[index]
        try:
            worker.produce(*self.current)
        except Fenced:
            self._end("abort")
        except NotYet:
            pass
        else:
            worker.flush()  # acks=all
            self.acked.add(index)
            self.run.written.setdefault((index, *self.current), (self.name, self.owner))
            assert self.run.written[index, *self.current] == (self.name, self.owner), (
                "an epoch has batches of two owners"
            )

    def _end(self, outcome: str) -> None:
        self.run.offset += 1
        self.request = {
            "transactional_id": NAME, "owner": self.owner, "producer_id": self.current[0],
            "producer_epoch": self.current[1], "outcome": outcome,
            "offsets": [{"group": "g", "entries": [["orders", 0, self.run.offset]]}],
        }  # fmt: skip
        self.state = "ending"
        self.run.sent.append(self.request)
        self._send()

    def _send(self) -> None:
        try:
            self.number = self.run.world.send(Api.END_TRANSACTION, **self.request)
        except TailraceError as error:
            self._refused(error)

    def take(self) -> None:
        """Take the answer, if there is one; it may be lost."""
        world = self.run.world
        if self.number not in world.answers:
            return
        number, self.number = self.number, -1
        if self.run.rng.random() < 0.2:
            if self.state == "init":
                self.state = "off"
            return
        try:
            body = world.answer(number)
        except TailraceError as error:
            self._refused(error)
            return
        if self.state == "init":
            self.owner = body["owner"]
        else:
            self.run.learn(self.current, body["outcome"])
            if body["outcome"] == "commit":
                self.run.committed_offset(self.request["offsets"][0]["entries"][0][2])
        self.current = (body["producer_id"], body["producer_epoch"])
        self.state, self.acked = "open", set()

    def _refused(self, error: TailraceError) -> None:
        if error.code.name == "PRODUCER_FENCED":
            self.state = "off"
        elif error.code.name in ("TRANSACTION_ABORTED", "INVALID_TRANSACTION"):
            body = getattr(error, "body", None)
            assert body is not None, error
            assert body["outcome"] != self.request["outcome"]
            assert error.code.name == "TRANSACTION_ABORTED", "this client never changes its mind"
            self.run.learn(self.current, body["outcome"])
            self.current = (body["producer_id"], body["producer_epoch"])
            self.state, self.acked = "open", set()


class Run:
    """One schedule."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(path)
        self.clients = [Client(self, "a"), Client(self, "b")]
        self.written: dict[tuple[int, int, int], tuple[str, int]] = {}
        self.outcomes: dict[tuple[int, int], str] = {}
        self.sent: list[dict[str, Any]] = []
        self.offset = 0
        self.known_offset = -1

    def learn(self, key: tuple[int, int], outcome: str) -> None:
        """A transaction's outcome was answered, or lies in a log as a marker."""
        assert self.outcomes.setdefault(key, outcome) == outcome, (key, outcome)

    def committed_offset(self, offset: int) -> None:
        self.known_offset = max(self.known_offset, offset)

    def step(self) -> None:
        rng, world = self.rng, self.world
        rng.choice(self.clients).act()
        if self.sent and rng.random() < 0.15:  # a late copy: its answer reaches nobody
            try:
                world.send(Api.END_TRANSACTION, **rng.choice(self.sent))
            except TailraceError:
                pass
        chance = rng.random()
        if chance < 0.02:
            self._lose_answers()
            world.kill()
        elif chance < 0.03:
            self._lose_answers()
            world.lose_power()
        elif chance < 0.05:
            world.kill_worker(rng.randrange(2))
        elif chance < 0.07:
            world.step(DiskFullError("full"))
        elif chance < 0.09:
            world.now_ns += 25 * SECOND_NS
        elif chance < 0.10:
            try:
                world.send(Api.ABORT_TRANSACTION, transactional_id=NAME)
            except TailraceError:
                pass
        world.now_ns += 50_000_000
        index = rng.randrange(2)
        worker = world.workers.workers[index]
        if rng.random() < 0.5:
            worker.read()
        if rng.random() < 0.5:
            world.report(index)
        if rng.random() < 0.5:
            worker.flush()
            world.coordinator.workers_changed()
        if rng.random() < 0.7:
            world.step()
        for client in self.clients:
            client.take()
        self.check()

    def _lose_answers(self) -> None:
        """The fronts answer instead of the killed process."""
        for client in self.clients:
            if client.number >= 0:
                client.number = -1
                if client.state == "init":
                    client.state = "off"

    def check(self) -> None:
        for worker in self.world.workers.workers:
            for what, producer_id, epoch in worker.log:
                if what != "data":
                    self.learn((producer_id, epoch), what)

    def finish(self) -> None:
        """Everything is carried out: no transaction hangs, and none is torn."""
        for _ in range(5):
            self.world.settle()
            self.world.now_ns += 3 * SECOND_NS
        self.check()
        described = self.world.ask(Api.LIST_TRANSACTIONS)["transactions"]
        current = {(one["producer_id"], one["producer_epoch"]) for one in described}
        for index, worker in enumerate(self.world.workers.workers):
            for producer_id, epoch in worker.open_in().items():
                assert (producer_id, epoch) in current, "a transaction hangs"
                assert (producer_id, epoch) not in self.outcomes, "a decision was not carried out"
            ended = {one[1:]: one[0] for one in worker.log if one[0] != "data"}
            for where, *key in self.written:
                outcome = self.outcomes.get((key[0], key[1]))
                if where == index and outcome is not None:
                    assert ended.get((key[0], key[1])) == outcome, "a batch has another outcome"
        asked = self.world.ask(Api.FETCH_OFFSETS, group="g", partitions=[["orders", 0]])
        assert int(asked["offsets"][0][2]) >= min(self.known_offset, 0)
        assert self.world.store.read("SELECT count(*) FROM decisions") == [(0,)]


@pytest.mark.parametrize("seed", short(range(25), *range(8)))
def test_random_schedules_tear_no_transaction_and_lose_no_decision(
    tmp_path: Path, seed: int
) -> None:
    run = Run(tmp_path, seed)
    for _ in range(STEPS):
        run.step()
    run.finish()
    run.world.store.close()
    assert run.outcomes, "nothing was decided"


def _first_failure(path: Path, seeds: int) -> str:
    """The first broken promise that a schedule finds; empty: none."""
    for seed in range(seeds):
        (path / str(seed)).mkdir()
        run = Run(path / str(seed), seed)
        try:
            for _ in range(STEPS):
                run.step()
            run.finish()
        except AssertionError as error:
            return str(error) or "assertion"
        finally:
            run.world.store.close()
    return ""


def test_the_schedules_find_rows_that_go_before_the_markers_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_done = DecisionLog.take_done
    monkeypatch.setattr(
        DecisionLog, "take_done", lambda self, *_: take_done(self, 1 << 62, (), -(1 << 62))
    )
    assert _first_failure(tmp_path, 25)


def test_the_schedules_find_an_answer_without_the_decided_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "find_end", lambda *_: None)
    assert _first_failure(tmp_path, 25)
