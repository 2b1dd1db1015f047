"""The program fuzzer: random sequences of public calls on clients of every kind, with exceptions,
cancellations, signals, kills, deletions of topics and jumps of the clock, held against the model of
docs/delivery.md and docs/transactions.md (`model`, `queue_model`, `transaction_model`).

The outcome of a program is one of two: it does what the model says, or there is a finding, with the
shortest program that still has it. A program is repeated by its seed and number; what the machine's
timing adds differs from run to run.

`make fuzz FUZZ=programs SECONDS=600 SEED=1`.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

from tailrace.core.errors import TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.fuzz.program.model import Finding
from tests.fuzz.program.operations import PARTITIONS, Operation, Program, listing
from tests.fuzz.program.run import run
from tests.fuzz.program.transaction_operations import program_of
from tests.kit.hosts.wall_clock import WallClock
from tests.kit.processes import children

SETTINGS = {
    "ring_bytes": 4 << 20,
    "lane_bytes": 1 << 20,
    "slots": 256,
    "journal_bytes": 1 << 20,
}
SHRINK_S = 120.0
TRIES = 2
"""Runs of a shorter program before it counts as one without the finding."""
LOG_LINES = 8


class ProgramFuzzer:
    """Programs, one after the other, on one appliance."""

    def __init__(self, seed: int, directory: pathlib.Path) -> None:
        self._seed = seed
        self._directory = directory
        try:
            self._clock: WallClock | None = WallClock(directory)
        except (FileNotFoundError, subprocess.CalledProcessError):
            self._clock = None  # no compiler: the clock does not jump
        self._appliance: EmbeddedAppliance | None = None
        self.program_count = self.operation_count = 0

    def close(self) -> None:
        """End the appliance. Raises Finding when it does not end cleanly."""
        appliance, self._appliance = self._appliance, None
        if appliance is not None:
            code = appliance.stop()
            if code:
                raise Finding(f"the appliance ended with {code}")

    def _running(self) -> EmbeddedAppliance:
        if self._appliance is None or not children(self._appliance):
            with contextlib.suppress(Finding):
                self.close()
            installed = self._clock.installed() if self._clock else contextlib.nullcontext()
            with installed:
                self._appliance = start_embedded(settings=SETTINGS, auto_create_topics=False)
        return self._appliance

    def log(self) -> str:
        """The last lines that the appliance has logged."""
        if self._appliance is None:
            return ""
        text = pathlib.Path(self._appliance.log_path).read_text(errors="replace")
        told = [line for line in text.splitlines() if " INFO " not in line]
        return "\n".join(told[-LOG_LINES:])

    def try_program(self, program: Program) -> Finding | None:
        """Run a program; returns what was found."""
        self.program_count += 1
        self.operation_count += len(program)
        try:
            run(program, self._running(), self._clock)
        except Finding as finding:
            return finding
        finally:
            if self._clock is not None:
                self._clock.jump(0)
        return None

    def program(self, number: int) -> Program:
        """The program of a number."""
        return program_of(f"{self._seed}/{number}")

    def shrink(self, program: Program, until_s: float) -> tuple[Program, Finding | None]:
        """Leave out what the finding does not need: halves, quarters, then single operations.
        Returns the program and its last finding, None where it did not come again.
        """
        finding = self._find_again(program)
        if finding is None:
            return program, None
        length = max(1, len(program) // 2)
        while True:
            at = len(PARTITIONS)  # their creation stays
            while at < len(program):
                shorter = program[:at] + program[at + length :]
                again = self._find_again(shorter)
                if again is not None:
                    program, finding = shorter, again
                else:
                    at += length
                if time.monotonic() > until_s:
                    return program, finding
            if length == 1:
                return program, finding
            length = max(1, length // 2)

    def _find_again(self, program: Program) -> Finding | None:
        for _ in range(TRIES):
            finding = self.try_program(program)
            if finding is not None:
                return finding
        return None


@contextlib.contextmanager
def fuzzer(seed: int) -> Iterator[ProgramFuzzer]:
    """A fuzzer with an appliance of its own."""
    with tempfile.TemporaryDirectory(prefix="tailrace-programs-") as directory:
        made = ProgramFuzzer(seed, pathlib.Path(directory))
        try:
            yield made
        except BaseException:
            with contextlib.suppress(Finding, TailraceError):
                made.close()
            raise
        made.close()


def fuzz(
    seed: int,
    seconds: float,
    say: Callable[[str], None],
    *,
    numbers: range | None = None,
    kept: frozenset[int] | None = None,
    shrinks: bool = True,
) -> int:
    """Programs for so long; returns how many findings there were, each said. `numbers`: these
    alone. `kept`: of each program only the operations with these indexes.
    """
    findings = 0
    begun_s = time.monotonic()
    with fuzzer(seed) as made:
        for number in numbers if numbers is not None else range(1 << 40):
            if time.monotonic() - begun_s > seconds:
                break
            program = made.program(number)
            if kept is not None:
                program = tuple(one for at, one in enumerate(program) if at in kept)
            finding = made.try_program(program)
            if finding is not None:
                findings += 1
                say(f"FINDING in program {number}: {finding}\n{_listing(program)}\n{made.log()}")
                if shrinks:
                    _say_shortest(made, program, number, say)
            elif number % 20 == 19:
                say(_summary(made, time.monotonic() - begun_s, findings))
        say(_summary(made, time.monotonic() - begun_s, findings))
    return findings


def _summary(made: ProgramFuzzer, seconds: float, findings: int) -> str:
    return (
        f"{seconds:.0f} s: programs={made.program_count} operations={made.operation_count} "
        f"findings={findings}"
    )


def _listing(program: Program) -> str:
    return "\n".join(f"    {line}" for line in listing(program).splitlines())


def _say_shortest(
    made: ProgramFuzzer, program: Program, number: int, say: Callable[[str], None]
) -> None:
    shortest, finding = made.shrink(program, time.monotonic() + SHRINK_S)
    if finding is None:
        say(f"program {number} does not do it again")
        return
    indexes = _indexes(program, shortest)
    say(f"the shortest has {len(shortest)} operations: {finding}\n{_listing(shortest)}")
    say(f"again: --programs {number}:{number} --keep {','.join(map(str, indexes))}")


def _indexes(program: Program, part: Program) -> list[int]:
    """Indexes of the operations that were kept: `part` has them in the same order."""
    found: list[int] = []
    rest = iter(enumerate(program))
    for operation in part:
        found.append(next(at for at, one in rest if _is_same(one, operation)))
    return found


def _is_same(one: Operation, other: Operation) -> bool:
    return one is other


def main(arguments: list[str]) -> int:
    """`SECONDS [SEED]`; the exit status says whether there were findings."""
    parser = argparse.ArgumentParser(prog="python -P -m tests.fuzz programs")
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int, nargs="?", default=None)
    parser.add_argument("--programs", default="", metavar="FIRST:LAST", help="only these")
    parser.add_argument("--keep", default="", metavar="N,...", help="only these operations of each")
    parser.add_argument("--no-shrink", action="store_true", help="go on behind a finding at once")
    given = parser.parse_args(arguments)
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    print(f"seed {seed}, {given.seconds:g} s", flush=True)
    first, _, last = given.programs.partition(":")
    findings = fuzz(
        seed,
        given.seconds,
        lambda text: print(text, flush=True),
        numbers=range(int(first), int(last or first) + 1) if first else None,
        kept=frozenset(map(int, given.keep.split(","))) if given.keep else None,
        shrinks=not given.no_shrink,
    )
    return int(bool(findings))
