"""Random programs: sequences of public calls of clients, with exceptions, cancellations, signals,
kills, deletions of topics and jumps of the clock between them.

A program is a pure function of its seed. Its operations name clients by slots (`c0`), so that each
of them can be left out: an operation on a slot that is not open does nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PRODUCERS = ("Producer", "AsyncProducer")
CONSUMERS = ("Consumer", "AsyncConsumer")
QUEUES = ("ShareConsumer", "AsyncShareConsumer")
VICTIMS = ("worker", "front", "groups", "flusher", "controller")
PARTITIONS = {"a": 2, "b": 1}
FAULTS = ("signals", "exceptions", "deletions", "kills", "jumps", "victims")
WAITS_MAX = 8
JUMPS_S = (-10 * 365 * 86_400, -3_600, -1, 1, 3_600, 8 * 86_400, 10 * 365 * 86_400)
LENGTHS = (8, 16, 32, 48)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call. `after_us`: a signal's handler raises KeyboardInterrupt so long after it begins.
    `at_wait`: its task is cancelled at this wait of it, counted from 0.
    """

    slot: str
    name: str
    arguments: tuple[Any, ...] = ()
    after_us: int | None = None
    at_wait: int | None = None

    def __str__(self) -> str:
        call = f"{self.slot}.{self.name}({', '.join(map(repr, self.arguments))})"
        if self.after_us is not None:
            return f"{call}  # KeyboardInterrupt after {self.after_us} us"
        return call if self.at_wait is None else f"{call}  # cancelled at wait {self.at_wait}"


Program = tuple[Operation, ...]


def listing(program: Program) -> str:
    """A program as text."""
    return "\n".join(map(str, program))


Choice = Callable[["Generator", str], tuple[str, tuple[Any, ...]]]


class Generator:
    """Makes the program of a seed."""

    def __init__(self, seed: str) -> None:
        self.rng = rng = random.Random(seed)
        self.faults = {fault for fault in FAULTS if rng.random() < 0.3}
        theme = rng.choice(("consumers", "consumers", "queues", "both"))
        self.producers = self._slots("p", PRODUCERS, 1, 2)
        self.consumers = {} if theme == "queues" else self._slots("c", CONSUMERS, 1, 3)
        self.queues = {} if theme == "consumers" else self._slots("q", QUEUES, 1, 3)
        self.kinds = {**self.producers, **self.consumers, **self.queues}

    def _slots(self, letter: str, kinds: tuple[str, ...], least: int, most: int) -> dict[str, str]:
        return {
            f"{letter}{number}": self.rng.choice(kinds)
            for number in range(self.rng.randint(least, most))
        }

    def program(self) -> Program:
        """All operations."""
        rng = self.rng
        limit = rng.choice((2, 3, 5))
        program = [Operation("world", "create", (name, limit)) for name in PARTITIONS]
        program += [self._open(slot) for slot in self.producers]
        program += [self._operation(rng.choice(list(self.producers)), "send") for _ in range(3)]
        program += [self._open(slot) for slot in (*self.consumers, *self.queues)]
        for _ in range(rng.choice(LENGTHS)):
            slot = rng.choice([*self.kinds, *self.consumers, *self.queues, "world"])
            if slot == "world":
                program += self._of_world()
            else:
                program.append(self._any(slot))
        return tuple(program)

    # ---- the world -------------------------------------------------------------------------------

    def _of_world(self) -> list[Operation]:
        rng = self.rng
        possible: list[list[Operation]] = []
        name = rng.choice(list(PARTITIONS))
        if "deletions" in self.faults:
            again = [Operation("world", "delete", (name,)), Operation("world", "create", (name, 3))]
            possible += [again, again, again[:1], again[1:]]
        if "kills" in self.faults:
            possible.append([Operation("world", "kill", (rng.choice(VICTIMS),))])
            possible.append([Operation("world", "settle")])
        if "jumps" in self.faults:
            possible.append([Operation("world", "jump", (rng.choice(JUMPS_S),))])
        if "victims" in self.faults:
            kind = rng.choice(("Consumer", "ShareConsumer"))
            arguments = (kind, rng.choice("gh"), name, rng.randint(0, 6), rng.random() < 0.5)
            possible.append([Operation("world", "victim", arguments)])
        possible.append([Operation("world", "check_offsets", (rng.choice("gh"),))])
        return rng.choice(possible)

    # ---- clients ---------------------------------------------------------------------------------

    def _open(self, slot: str) -> Operation:
        rng, kind = self.rng, self.kinds[slot]
        settings: dict[str, Any] = {}
        if slot[0] == "p":
            settings = {
                "linger_ms": rng.choice((0, 1, 5)),
                "acks": rng.choice((1, "all", "all")),
                "compression_type": rng.choice((None, None, "lz4", "zstd")),
                "max_in_flight_requests_per_connection": rng.choice((1, 5)),
            }
            return Operation(slot, "open", (kind, settings))
        settings["max_poll_records"] = rng.choice((1, 3, 500))
        deserializes = rng.random() < 0.4
        if slot[0] == "q":
            settings["share_acknowledgement_mode"] = rng.choice(
                ("implicit", "implicit", "explicit")
            )
            return Operation(slot, "open", (kind, "s", self._names(), settings, deserializes))
        settings["enable_auto_commit"] = rng.random() < 0.7
        settings["auto_commit_interval_ms"] = rng.choice((0, 3_600_000))
        if rng.random() < 0.2:
            settings["fetch_max_bytes"] = 1024
        # Group g is of subscribers, group h of readers that assign.
        group = rng.choice(("g", "g", "h", "h", None))
        return Operation(slot, "open", (kind, group, self._names(), settings, deserializes))

    def _names(self) -> tuple[str, ...]:
        return self.rng.choice((("a",), ("a", "b"), ("a", "b"), ("b",)))

    def _any(self, slot: str) -> Operation:
        weights = CALLS[slot[0]]
        names = [name for name in weights if name not in ONLY_OF or self._has(slot, name)]
        name = self.rng.choices(names, [weights[name] for name in names])[0]
        return self._operation(slot, name)

    def _has(self, slot: str, name: str) -> bool:
        requested = ONLY_OF[name]
        return requested in self.faults or requested == self.kinds[slot]

    def _operation(self, slot: str, name: str) -> Operation:
        rng = self.rng
        if name == "open":
            return self._open(slot)
        make = ARGUMENTS.get(name)
        arguments = () if make is None else make(rng)
        after_us = at_wait = None
        if "signals" in self.faults and name in CUT_OFF and rng.random() < 0.4:
            if self.kinds[slot].startswith("Async"):
                at_wait = rng.randrange(WAITS_MAX)
            else:
                after_us = int(10 ** rng.uniform(1.0, 4.7))
        return Operation(slot, name, arguments, after_us, at_wait)


CALLS: dict[str, dict[str, float]] = {
    "p": {"send": 8, "wait": 2, "flush": 2, "fail_callback": 0.5, "close": 0.4, "open": 0.5},
    "c": {
        "poll": 6, "consume": 3, "loop": 6, "getone": 3, "poll_arrow": 2, "seek": 1.5,
        "seek_to_beginning": 0.5, "seek_to_end": 0.5, "pause": 1, "resume": 1.5, "commit": 3,
        "commit_offsets": 1, "commit_record": 1, "commit_async": 1.5, "positions": 2,
        "position": 1, "lag": 1, "committed": 1, "subscribe": 0.7, "unsubscribe": 0.5,
        "fail_deserializer": 1, "fail_listener": 1, "close": 1, "open": 1,
    },
    "q": {
        "poll": 6, "loop": 6, "acknowledge": 5, "commit": 3, "unsubscribe": 0.4, "subscribe": 0.6,
        "fail_deserializer": 1, "close": 1, "open": 1,
    },
}  # fmt: skip
"""First letter of a slot -> call -> how often it comes."""
ONLY_OF = {
    "getone": "AsyncConsumer", "fail_deserializer": "exceptions", "fail_listener": "exceptions",
    "fail_callback": "exceptions",
}  # fmt: skip
CUT_OFF = frozenset({
    "send", "wait", "flush", "poll", "consume", "loop", "getone", "poll_arrow", "commit",
    "position", "lag", "committed", "close", "unsubscribe",
})  # fmt: skip
ENDS = ("break", "break", "exception")
BODIES = ("", "", "", "poll", "commit", "positions")
CLOSES = ("close", "close", "block", "exception", "without commit")


def _timeout_ms(rng: random.Random) -> int:
    return rng.choice((0, 20, 200, 200, 1000))


ARGUMENTS: dict[str, Callable[[random.Random], tuple[Any, ...]]] = {
    "send": lambda rng: (
        rng.choice("aab"), rng.choice((None, 0, 1)), rng.choice((None, "k1", "k2")),
        rng.choice((1, 3, 10)), rng.choice((0, 0, 3000)),
    ),
    "poll": lambda rng: (_timeout_ms(rng), rng.choice((None, 1, 2, 5))),
    "consume": lambda rng: (rng.randint(1, 8), rng.choice((0.0, 0.2, 1.0))),
    "loop": lambda rng: (rng.randint(1, 6), rng.choice(BODIES), rng.choice(ENDS)),
    "poll_arrow": lambda rng: (_timeout_ms(rng),),
    "seek": lambda rng: (rng.randrange(4), rng.random()),
    "pause": lambda rng: (rng.randrange(4),),
    "resume": lambda rng: (rng.randrange(4),),
    "position": lambda rng: (rng.randrange(4),),
    "lag": lambda rng: (rng.randrange(4),),
    "commit_offsets": lambda rng: (rng.randrange(4), rng.random()),
    "commit_record": lambda rng: (rng.randrange(8),),
    "commit_async": lambda rng: (rng.random() < 0.5,),
    "subscribe": lambda rng: (rng.choice((("a",), ("a", "b"), ("b",))),),
    "fail_deserializer": lambda rng: (rng.randrange(1, 6), rng.random() < 0.7),
    "fail_listener": lambda rng: (rng.randrange(1, 3), rng.random() < 0.7),
    "acknowledge": lambda rng: (
        rng.randrange(8), rng.choice(("accept", "accept", "release", "reject", "renew")),
    ),
    "close": lambda rng: (rng.choice(CLOSES),),
}  # fmt: skip
