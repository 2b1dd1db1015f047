"""The transactions of random programs: calls of transactional producers between the operations of
`tests.fuzz.program.operations`, and whether the dead letters are sent again at the end.

A pure function of the program's seed, with a random stream of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.program.operations import PRODUCERS, WAITS_MAX, Generator, Operation, Program

SHARE = 0.4
"""The part of programs with transactions."""
REDRIVE_SHARE = 0.3
LENGTHS = (6, 12, 24)
CALLS: dict[str, float] = {
    "begin": 6, "send": 8, "flush": 1, "branch": 2, "offsets": 2, "commit": 5, "abort": 1.5,
    "block": 3, "prepare": 1.5, "close": 0.7, "open": 1.5,
}  # fmt: skip
CUT_OFF = frozenset(
    {"begin", "send", "flush", "branch", "offsets", "commit", "abort", "block", "prepare", "close"}
)
TAGS = ("", "x", "batch 7")
ARGUMENTS: dict[str, Callable[[random.Random], tuple[Any, ...]]] = {
    "send": lambda rng: (rng.randint(1, 5),),
    "branch": lambda rng: (rng.randint(0, 4), rng.random() < 0.8, rng.random() < 0.7),
    "offsets": lambda rng: (rng.randint(1, 20),),
    "block": lambda rng: (rng.randint(0, 5), rng.random() < 0.3),
    "prepare": lambda rng: (rng.choice(TAGS),),
}


def program_of(seed: str) -> Program:
    """The program of a seed."""
    generator = Generator(seed)
    program = generator.program()
    return _with_transactions(seed, program, has_signals="signals" in generator.faults)


def _with_transactions(seed: str, program: Program, *, has_signals: bool) -> Program:
    """The program, with calls of transactional producers between its operations."""
    rng = random.Random(f"{seed}/transactions")
    result = list(program)
    if rng.random() < SHARE:
        kinds = {f"t{number}": rng.choice(PRODUCERS) for number in range(rng.randint(1, 3))}
        names = {slot: rng.choice("xxy") for slot in kinds}
        begin = next(at for at, one in enumerate(program) if one.slot != "world")
        added = [_operation(rng, slot, "open", kinds, names, has_signals) for slot in kinds]
        for _ in range(rng.choice(LENGTHS)):
            if rng.random() < 0.15:
                added.append(Operation("world", "read_committed"))
                continue
            slot = rng.choice(list(kinds))
            name = rng.choices(list(CALLS), list(CALLS.values()))[0]
            added.append(_operation(rng, slot, name, kinds, names, has_signals))
        places = sorted(rng.randint(begin, len(program)) for _ in added)
        for at, operation in reversed(list(zip(places, added, strict=True))):
            result.insert(at, operation)
    if rng.random() < REDRIVE_SHARE:
        result.append(Operation("world", "redrive"))
    return tuple(result)


def _operation(
    rng: random.Random,
    slot: str,
    name: str,
    kinds: dict[str, str],
    names: dict[str, str],
    has_signals: bool,
) -> Operation:
    if name == "open":
        settings = {"linger_ms": rng.choice((0, 1, 50))}
        return Operation(slot, "open", (kinds[slot], names[slot], settings))
    make = ARGUMENTS.get(name)
    arguments = () if make is None else make(rng)
    after_us = at_wait = None
    if has_signals and name in CUT_OFF and rng.random() < 0.4:
        if kinds[slot].startswith("Async"):
            at_wait = rng.randrange(WAITS_MAX)
        else:
            after_us = int(10 ** rng.uniform(1.0, 4.7))
    return Operation(slot, name, arguments, after_us, at_wait)
