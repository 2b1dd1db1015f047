"""Schedules for as long as wanted, on every core: `make simulate SECONDS=600 SEED=1`, those of
transactions with `make simulate-transactions`, of compacted topics with `make simulate-compaction`.
Prints the seed of each that fails.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from rich.progress import Progress

from tests.sim import schedule
from tests.sim.compaction import schedule as compaction_schedule
from tests.sim.transactions import schedule as transaction_schedule

TRANSACTIONS = "--transactions"
COMPACTION = "--compaction"


def _one(seed: int) -> tuple[int, int, str]:
    """(seed, steps, what went wrong)."""
    return _run(schedule.run, seed)


def _one_of_transactions(seed: int) -> tuple[int, int, str]:
    return _run(transaction_schedule.run, seed)


def _one_of_compaction(seed: int) -> tuple[int, int, str]:
    return _run(compaction_schedule.run, seed)


def _run(run: Callable[[int], Any], seed: int) -> tuple[int, int, str]:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        return seed, run(seed).world.steps, ""
    except Exception as error:  # of any kind: what is wanted is its seed
        return (
            seed,
            0,
            f"{type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", [])),
        )


def main() -> int:
    kinds = {TRANSACTIONS: _one_of_transactions, COMPACTION: _one_of_compaction}
    arguments = [argument for argument in sys.argv[1:] if argument not in kinds]
    one = next((kinds[argument] for argument in sys.argv[1:] if argument in kinds), _one)
    seconds = int(arguments[0]) if arguments else 60
    first = int(arguments[1]) if len(arguments) > 1 else int.from_bytes(os.urandom(4), "little")
    print(f"seeds from {first} on, for {seconds} s", flush=True)
    begun, count, steps, failures = time.monotonic(), 0, 0, 0
    at_once = 16 * (os.cpu_count() or 1)
    with multiprocessing.Pool() as pool, Progress(disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("schedules", total=seconds)
        while (elapsed := time.monotonic() - begun) < seconds:
            progress.update(task, completed=elapsed)
            for seed, its_steps, failure in pool.map(
                one, range(first + count, first + count + at_once), chunksize=4
            ):
                steps += its_steps
                if failure:
                    failures += 1
                    print(f"seed {seed}: {failure}", flush=True)
            count += at_once
    print(
        f"{count} schedules, {steps} steps, {count / elapsed * 60:.0f} schedules a minute, "
        f"{failures} failures"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
