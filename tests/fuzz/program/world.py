"""State that the clients of a fuzzed program share: names, the models, the records that were sent,
and the errors that the world's faults explain.

Owner: one ProgramRun (`tests.fuzz.program.run`). Invariants: names of topics and groups are this
run's own, so that many runs share an appliance.
"""

from __future__ import annotations

import itertools
import logging
import os
from dataclasses import dataclass
from typing import Any

from tailrace.core.errors import (
    CommitFailedError,
    DeliveryTimeoutError,
    FencedMemberError,
    LockLostError,
    TailraceError,
    UnknownMemberError,
    UnknownTopicError,
)
from tests.fuzz.program.calls import Calls
from tests.fuzz.program.model import Committed, Key, Topics, expect
from tests.fuzz.program.operations import PARTITIONS
from tests.fuzz.program.queue_model import Queue
from tests.fuzz.program.transaction_model import Ledger

_numbers = itertools.count()


@dataclass(slots=True)
class Sent:
    """A record that a producer was given."""

    value: bytes
    producer: str
    number: int
    topic: str
    partition: int | None
    key: str | None
    creation: int
    """Number of creations of the topic's name."""
    handle: Any = None
    is_durable: bool = False
    """An acknowledgement says that it can be read; else, that it will be."""
    place: tuple[int, int] | None = None
    """(partition, offset) of its acknowledgement."""
    is_withdrawn: bool = False
    """Its `send` was cancelled: nothing was sent."""


class Warnings(logging.Handler):
    """Counts what clients warn of: commits that nobody waits for have failed then."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, _record: logging.LogRecord) -> None:
        self.count += 1


class World:
    """See the module's docstring."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.prefix = f"r{next(_numbers)}-{os.urandom(3).hex()}"
        self.partitions = PARTITIONS
        self.topics = Topics()
        self.offsets: dict[tuple[str, bytes, int], Committed] = {}
        self.queue = Queue(limit=5)
        self.sent: dict[bytes, Sent] = {}
        self.short = {self.name(name): name for name in PARTITIONS}
        self.has_deletions = False
        self.calls = Calls()
        self.log = Warnings()
        self.ledger = Ledger()
        self.kill_count = self.delete_count = 0

    @property
    def warnings(self) -> int:
        """Number of warnings that the clients have logged."""
        return self.log.count

    def name(self, short: str) -> str:
        """The name of a topic or group of this run."""
        return f"{self.prefix}-{short}"

    def make_ledger(self) -> None:
        """Have the topics of the transactions, once."""
        raise NotImplementedError

    # ---- what clients ask ------------------------------------------------------------------------

    def allows(self, error: TailraceError) -> bool:
        """True for an error that the world's faults explain."""
        if self.kill_count and (
            error.retriable or isinstance(error, (LockLostError, UnknownMemberError))
        ):
            return True
        if isinstance(error, (CommitFailedError, FencedMemberError, UnknownMemberError)):
            return True  # members come and go
        return bool(self.delete_count) and isinstance(
            error, (UnknownTopicError, DeliveryTimeoutError, LockLostError)
        )

    def is_current(self, topic_id: bytes | None) -> bool:
        """True for the topic that has its name now."""
        return self.topics.is_current(topic_id)

    def see(self, key: Key, topic_id: bytes, offset: int, value: bytes, reader: str) -> None:
        """A record was read."""
        where = f"{reader}: offset {offset} of {key[0]}-{key[1]}"
        expect(topic_id in self.topics.creations[key[0]], f"{where} has a topic id of no creation")
        expect(value in self.sent, f"{where} was never sent: {value!r:.60}")
        self.topics.see((topic_id, key[1], offset), value, where)

    def ends(self, key: Key) -> tuple[int, int]:
        """Bounds of the end that readers find of the partition: at least, at most."""
        possible = [
            sent
            for sent in self.sent.values()
            if sent.topic == key[0] and sent.partition in (None, key[1])
        ]
        return max(
            (
                sent.place[1] + 1
                for sent in self.acknowledged(key)
                if sent.is_durable and sent.place
            ),
            default=0,
        ), len(possible)

    def acknowledged(self, key: Key) -> list[Sent]:
        """Records that the present topic surely has in this partition."""
        creation = len(self.topics.creations[key[0]])
        return [
            sent
            for sent in self.sent.values()
            if sent.topic == key[0]
            and sent.creation == creation
            and sent.place is not None
            and sent.place[0] == key[1]
        ]
