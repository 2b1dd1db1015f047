"""Seeds of the randomised suites: fixed ones in `make test`, new ones in each `make test-all`.

Invariants:
- All processes of one run draw from the same base seed, so that xdist's workers collect the same
  tests.
- A test's id names the seeds that it runs: `pytest "FILE::TEST[seeds 7-56]"` with `SEED=7` runs it
  again. `SEED=` sets the base of a whole run; without it the base is new each time, and printed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

VARIABLE = "SEED"


def base() -> int:
    """The base seed of this run, set for its worker processes too."""
    given = os.environ.get(VARIABLE)
    if not given:
        given = os.environ[VARIABLE] = str(int.from_bytes(os.urandom(4), "little"))
    if not given.isdigit():
        raise ValueError(f"{VARIABLE} is {given!r}: set it to a number of digits only")
    return int(given)


def new_blocks(count: int, seeds_each: int) -> list[range]:
    """`count` blocks of new seeds, one a test."""
    first = base()
    return [range(first + n * seeds_each, first + (n + 1) * seeds_each) for n in range(count)]


def fixed_blocks(count: int, seeds_each: int) -> list[range]:
    """The blocks of seeds that run each time."""
    return [range(n * seeds_each, (n + 1) * seeds_each) for n in range(count)]


def block_name(block: Iterable[int]) -> str:
    """The id of a test of these seeds."""
    seeds = list(block)
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]}-{seeds[-1]}"


def examples(count: int) -> int:
    """So many examples of hypothesis in a run of everything, and fewer where long tests stay out
    (the profiles of tests/conftest.py).
    """
    from hypothesis import settings

    return int(count * settings.default.max_examples // 100)


def run_each(run: Callable[[int], Any], block: Iterable[int]) -> None:
    """Run every seed; the error of one that fails names it."""
    for seed in block:
        try:
            run(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
