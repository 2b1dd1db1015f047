"""A transactional program over the SDK's Producer, beside those that make requests themselves.

It does what docs/transactions.md says: a commit without an outcome is repeated, a transaction that
cannot be committed is aborted, and a fenced producer is replaced. Now and then it is killed, or
another one takes its id while it goes on.

    idle -> open -> committing -> idle
                \\       \\ it cannot be committed: aborting -> idle

Owner: one `tests.sim.transactions.schedule.TransactionSchedule`.
Invariants: a call that a loss of power, or a kill of all, has interrupted is made another time.
"""

from __future__ import annotations

import random
from contextlib import suppress

from tailrace.core.errors import (
    NotReachableError,
    ProducerFencedError,
    RequestTimeoutError,
    TailraceError,
    TransactionAbortedError,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.producer.futures import RecordFuture
from tailrace.producer.producer import Producer
from tests.kit.transactional.transaction_checker import Token, TransactionHistory, value_of
from tests.sim.machine.machine_parts import ADDRESS, MS
from tests.sim.machine.world import World

WAKE_NS = 50 * MS
TIMEOUTS_S = (0.02, 0.5, 5.0)
"""Time that a commit or an abort is waited for."""


class SdkProgram:
    """A transactional id, its owner, and those who were it and do not know it yet."""

    def __init__(
        self, name: str, world: World, rng: random.Random, history: TransactionHistory,
        places: list[TopicPartition],
    ) -> None:  # fmt: skip
        self.name = name
        self.world = world
        self.rng = rng
        self.history = history
        self.places = places
        self.is_calm = False
        self.lives = [Life(self)]

    def turn(self) -> None:
        chance = self.rng.random()
        if chance < 0.02:
            self.lives.pop().die()
        elif chance < 0.04 and len(self.lives) < 3:
            self.lives.append(Life(self))
        self.pump()

    def pump(self) -> None:
        for life in list(self.lives):
            life.turn()
        self.lives = [life for life in self.lives if life.state != "gone"] or [Life(self)]

    @property
    def is_at_rest(self) -> bool:
        return all(life.state == "idle" for life in self.lives)

    def is_ready(self, _now_ns: int) -> bool:
        """True if it has something to do."""
        return not self.is_at_rest

    def next_wake_ns(self, now_ns: int) -> int:
        return now_ns + WAKE_NS

    def close(self) -> None:
        for life in self.lives:
            life.die()


class Life:
    """One life of the program."""

    def __init__(self, program: SdkProgram) -> None:
        self._program = program
        self._producer = Producer(
            ADDRESS, runtime=program.world.runtime, transactional_id=program.name,
            transaction_timeout_ms=program.rng.choice((500, 5_000, 60_000)), max_block_ms=2_000,
            delivery_timeout_ms=program.rng.choice((1_000, 60_000)),
            linger_ms=program.rng.choice((0, 5)),
        )  # fmt: skip
        self._owner = -1
        self._number = 0
        self._left = 0
        """Records that the transaction will have besides those that it has."""
        self._sent: list[tuple[bytes, RecordFuture]] = []
        self._is_sending = False
        """True while a record is sent, and after that was interrupted."""
        self.state = "idle"

    @property
    def token(self) -> Token:
        return Token(self._program.name, self._owner, self._number)

    def turn(self) -> None:
        """One call of the producer. What was not done in time is tried another time."""
        calls = {
            "idle": self._begin, "open": self._go_on, "committing": self._commit,
            "aborting": self._abort,
        }  # fmt: skip
        try:
            calls[self.state]()
        except (RequestTimeoutError, NotReachableError):
            pass
        except ProducerFencedError:
            self.die()

    def die(self) -> None:
        """End, as by a SIGKILL."""
        self.state = "gone"
        self._note_acknowledged()
        self._producer._sender_thread.stop()

    # ---- calls -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._program.is_calm:
            return
        self._producer.begin_transaction()
        assert self._producer._transactions is not None
        self._owner = self._producer._transactions._state.owner
        self._left = self._program.rng.randint(1, 6)
        self.state = "open"

    def _go_on(self) -> None:
        rng, history = self._program.rng, self._program.history
        if self._is_sending:
            self.state = "aborting"
        elif self._left:
            try:
                self._send()
            except ProducerFencedError:
                raise
            except TailraceError:
                self.state = "aborting"
        elif rng.random() < 0.15:
            self.state = "aborting"
        else:
            history.ask_commit(self.token)
            self.state = "committing"

    def _send(self) -> None:
        program = self._program
        place = program.rng.choice(program.places)
        value = value_of(self.token, len(self._sent))
        program.history.send(self.token, place, value)
        self._is_sending = True
        future = self._producer.send(place.topic, value, partition=place.partition)
        self._sent.append((value, future))
        self._is_sending = False
        self._left -= 1

    def _commit(self) -> None:
        try:
            self._producer.commit_transaction(self._program.rng.choice(TIMEOUTS_S))
        except TransactionAbortedError:
            self._program.history.end(self.token, "abort")
            self.state = "aborting"
            return
        failed = [value for value, future in self._sent if future.exception(0) is not None]
        assert not failed, f"{self.token} was committed, and these failed: {failed}"
        self._ended("commit")

    def _abort(self) -> None:
        self._producer.abort_transaction(self._program.rng.choice(TIMEOUTS_S))
        self._ended("abort")

    def _ended(self, outcome: str) -> None:
        self._program.history.end(self.token, outcome)
        self._note_acknowledged()
        self._sent = []
        self._is_sending = False
        self._number += 1
        self.state = "idle"

    def _note_acknowledged(self) -> None:
        for value, future in self._sent:
            with suppress(TailraceError):
                offset = future.result(0).offset
                assert offset is not None
                self._program.history.acknowledge(value, offset)
