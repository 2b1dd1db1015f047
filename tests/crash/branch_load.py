"""A job of the transactions' torture: one transaction over tasks in processes of their own, which
are killed and repeated; sometimes a second attempt of a task finishes too.

Owner: one thread of the run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

from tailrace import FinishedBranch, Producer, TransactionBranch
from tests.kit.transactional.branch_writer import BranchWriterProcess

TASKS = 2
ROWS = 6
LONG_MS = 600_000


class BranchLoad:
    """The job, and what its commits have promised."""

    def __init__(self, address: str, topic: str, seed: int) -> None:
        self._address = address
        self._topic = topic
        self._chance = random.Random(f"branches {seed}")
        self._committed: list[str] = []
        self.committed_count = self.aborted_count = self.killed_count = 0

    def run(self, producer: Producer, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Run jobs until `is_over`."""
        number = 0
        while not is_over():
            number += 1
            values = [[f"{number} {task} {row}" for row in range(ROWS)] for task in range(TASKS)]
            producer.begin_transaction()
            branches = producer.create_transaction_branches(TASKS)
            finished = []
            for branch, rows in zip(branches, values, strict=True):
                results = [self._task(branch, rows)]
                if self._chance.random() < 0.3:  # a speculative attempt
                    results.append(self._task(branch, rows))
                finished.append(self._chance.choice(results))
            if self._chance.random() < 0.75:
                producer.commit_transaction(timeout_s, branches=finished)
                self._committed += [row for rows in values for row in rows]
                self.committed_count += 1
            else:
                producer.abort_transaction(timeout_s)
                self.aborted_count += 1

    def _task(self, branch: TransactionBranch, rows: list[str]) -> FinishedBranch:
        """One task: it is attempted until an attempt lives to its end."""
        while True:
            with ExitStack() as stack:
                writer = BranchWriterProcess()
                stack.callback(writer.close)
                writer.begin(
                    self._address, self._topic, branch, rows,
                    delivery_timeout_ms=LONG_MS, max_block_ms=LONG_MS,
                )  # fmt: skip
                if self._chance.random() >= 0.4:
                    return writer.finish()
                writer.kill()
                self.killed_count += 1

    def check(self, found: Counter[str]) -> None:
        """`found`: the committed values of the topic. Raises AssertionError."""
        expected = Counter(self._committed)
        assert found == expected, (
            f"branches: missing {list((expected - found).elements())[:5]}, too many "
            f"{list((found - expected).elements())[:5]}"
        )
