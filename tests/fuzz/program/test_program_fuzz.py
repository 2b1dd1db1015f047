"""A round of the program fuzzer, the same programs each time; more by `make fuzz FUZZ=programs`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from tailrace import Consumer, Producer, Record
from tests.fuzz.program import clients, consumers, program_fuzzer
from tests.fuzz.program.calls import Calls
from tests.fuzz.program.model import Finding
from tests.fuzz.program.operations import PARTITIONS, Operation
from tests.fuzz.program.transaction_operations import program_of
from tests.kit import seeds
from tests.kit.processes import HANG_LIMIT_S

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Python throws away the exceptions of a handler that runs while an object is destroyed."""
SEED = 1
NUMBERS = range(3)
NEW_PROGRAMS = 150
LONG_S = 3_600.0


def test_programs_of_public_calls_get_what_the_page_of_deliveries_promises() -> None:
    said: list[str] = []
    assert not program_fuzzer.fuzz(
        SEED, HANG_LIMIT_S, said.append, numbers=NUMBERS, shrinks=False
    ), said


@pytest.mark.long
@pytest.mark.parametrize("seed", [seeds.base()])
def test_new_programs_of_public_calls_get_what_the_page_of_deliveries_promises(seed: int) -> None:
    said: list[str] = []
    numbers = range(NEW_PROGRAMS)
    assert not program_fuzzer.fuzz(seed, LONG_S, said.append, numbers=numbers), "\n".join(said)


def test_a_program_is_a_function_of_its_seed() -> None:
    assert program_of("7/3") == program_of("7/3") != program_of("7/4")


def test_what_the_fuzzer_calls_of_the_standard_library_is_not_cut_off() -> None:
    """A record that a loop has was lost to the model where a signal came into `contextlib`."""
    calls = Calls()
    try:
        operation = Operation("c0", "poll", after_us=100)
        lines = calls.make(operation, lambda: textwrap.wrap("word " * 20_000))
    finally:
        calls.close()
    assert sum(line.count("word") for line in lines) == 20_000


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[program_fuzzer.ProgramFuzzer]:
    """A fuzzer for programs that share its appliance."""
    with program_fuzzer.fuzzer(SEED) as made:
        yield made


def test_the_commit_of_a_reader_of_unknown_position_may_be_any_of_its_possible_offsets(
    fuzzer: program_fuzzer.ProgramFuzzer,
) -> None:
    """Two readers of one group begin at 0. One commits 1 and then the other, which was given
    nothing yet, commits 0.
    """
    commits_itself = {"enable_auto_commit": True, "auto_commit_interval_ms": 0}
    is_told = {"enable_auto_commit": False, "auto_commit_interval_ms": 0}
    program = (
        *(Operation("world", "create", (name, 5)) for name in PARTITIONS),
        Operation("p0", "open", ("Producer", {"acks": "all", "linger_ms": 0})),
        Operation("c0", "open", ("Consumer", "h", ("b",), commits_itself, False)),
        Operation("c1", "open", ("Consumer", "h", ("b",), is_told, False)),
        Operation("c1", "lag", (0,)),
        Operation("p0", "send", ("b", 0, None, 1, 0)),
        Operation("p0", "wait"),
        Operation("c0", "consume", (1, HANG_LIMIT_S)),
        Operation("c0", "commit"),
        Operation("c1", "commit_async", (True,)),
        Operation("c1", "close", ("without commit",)),
        Operation("world", "check_offsets", ("h",)),
    )
    assert fuzzer.try_program(program) is None


@pytest.mark.parametrize("kind", ["Producer", "AsyncProducer"])
def test_a_fenced_producer_commits_an_empty_transaction_without_asking_and_no_other(
    fuzzer: program_fuzzer.ProgramFuzzer, kind: str
) -> None:
    for content in ((), (Operation("t1", "send", (2,)),)):
        program = (
            Operation("t1", "open", (kind, "x", {"linger_ms": 0})),
            Operation("t1", "begin"),
            *content,
            Operation("t0", "open", (kind, "x", {"linger_ms": 0})),
            Operation("t1", "commit"),
        )
        assert fuzzer.try_program(program) is None


def test_a_skipped_record_is_found_and_the_program_is_cut_to_what_shows_it(
    fuzzer: program_fuzzer.ProgramFuzzer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Skipping(Consumer):
        """Delivers all but the first record."""

        def poll(self, *arguments: Any, **others: Any) -> list[Record]:
            return super().poll(*arguments, **others)[1:]

    settings = {"enable_auto_commit": True, "auto_commit_interval_ms": 3_600_000}
    needed = [
        Operation("p0", "open", ("Producer", {"acks": "all", "linger_ms": 50})),
        Operation("p0", "send", ("a", 0, None, 3, 0)),
        Operation("c0", "open", ("Consumer", None, ("a",), settings, False)),
        Operation("c0", "poll", (300, None)),
    ]
    program = (
        *(Operation("world", "create", (name, 5)) for name in PARTITIONS),
        needed[0],
        Operation("p0", "flush"),
        *needed[1:],
        Operation("c0", "positions"),
    )
    assert fuzzer.try_program(program) is None
    monkeypatch.setitem(consumers.KINDS, "Consumer", Skipping)
    shortest, finding = fuzzer.shrink(program, until_s=float("inf"))
    assert isinstance(finding, Finding)
    assert "came where [0] belongs" in str(finding)
    assert list(shortest[len(PARTITIONS) :]) == needed


def test_a_transaction_that_is_half_visible_or_committed_for_an_abort_is_found(
    fuzzer: program_fuzzer.ProgramFuzzer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Confused(Producer):
        """Commits what it is to abort."""

        def abort_transaction(self, timeout: float | None = None) -> None:
            super().commit_transaction(timeout)

    class Losing(Producer):
        """Commits without the finished branches."""

        def commit_transaction(self, timeout: float | None = None, *, branches: Any = None) -> None:
            super().commit_transaction(timeout, branches=branches and branches[1:])

    opened = Operation("t0", "open", ("Producer", "x", {"linger_ms": 1}))
    begins = [opened, Operation("t0", "begin"), Operation("t0", "send", (2,))]
    aborted = (*begins, Operation("t0", "abort"))
    branched = (*begins, Operation("t0", "branch", (2, True, True)), Operation("t0", "commit"))
    for program, kind, finding in (
        (aborted, Confused, "is read, and its transaction"),
        (branched, Losing, "are lost"),
    ):
        assert fuzzer.try_program(program) is None
        with monkeypatch.context() as planted:
            planted.setitem(clients.KINDS, "Producer", kind)
            assert finding in str(fuzzer.try_program(program))
