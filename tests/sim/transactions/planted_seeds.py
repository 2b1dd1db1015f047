"""The first seed that finds each planted fault of transactions, and the seconds that it takes:
`python -P -m tests.sim.transactions.planted_seeds [FAULT...]`. For the numbers in `PLANTED` and
`DIRECTED`, when a change of the simulation has moved them.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
import warnings

import pytest

from tailrace.core.errors import TailraceError
from tests.sim.transactions.planted_faults import DIRECTED, PLANTED
from tests.sim.transactions.schedule import run

SEARCHED = 40
FAULTS = {
    plant.__name__[1:]: (plant, faults)
    for plant, _, faults in [*((plant, first, ()) for plant, first in PLANTED), *DIRECTED]
}


def first_seed(fault: str) -> tuple[str, int | None, float]:
    """(fault, the first seed that finds it, seconds of that seed)."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    plant, faults = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in range(SEARCHED):
            begun = time.monotonic()
            try:
                run(seed, faults) if faults else run(seed)
            except (AssertionError, TailraceError):
                return fault, seed, time.monotonic() - begun
    return fault, None, 0.0


def main() -> None:
    with multiprocessing.Pool() as pool:
        for fault, seed, seconds in pool.imap_unordered(first_seed, sys.argv[1:] or FAULTS):
            print(f"{fault:40} seed {seed} {seconds:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
