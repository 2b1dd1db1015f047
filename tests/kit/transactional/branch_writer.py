"""A process that writes branches of transactions, for tests that kill it.

Each line of its input is a task (JSON). It sends the first half of the values and waits until they
are acknowledged, says "half", and goes on with the next line of its input. Then it finishes the
branch, and says the result as JSON; or what it raised.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tailrace import FinishedBranch, Producer, TailraceError, TransactionBranch


class BranchWriterProcess:
    """The process, as a test has it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.kit.transactional.branch_writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(
        self, address: str, topic: str, branch: TransactionBranch, values: list[str],
        **settings: int,
    ) -> None:  # fmt: skip
        """Have it write the first half. Returns when that is acknowledged."""
        task = {
            "address": address, "topic": topic, "branch": branch.to_json(), "values": values,
            "settings": settings,
        }  # fmt: skip
        self._write(json.dumps(task))
        answer = self._read()
        assert answer == "half", answer

    def finish(self) -> FinishedBranch:
        """Have it write the second half, and finish the branch. Raises AssertionError with what it
        raised.
        """
        self._write("go on")
        answer = self._read()
        assert answer.startswith("{"), answer
        return FinishedBranch.from_json(answer)

    def error(self) -> str:
        """Have it write the second half, which fails. The name of the error and its sentence."""
        self._write("go on")
        return self._read()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End it. A repeated call does nothing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def write(task: dict[str, Any]) -> str:
    """Write one branch."""
    values, branch = task["values"], TransactionBranch.from_json(task["branch"])
    half = len(values) // 2
    try:
        with Producer(task["address"], transaction_branch=branch, **task["settings"]) as writer:
            for value in values[:half]:
                writer.send(task["topic"], value.encode())
            writer.flush()
            print("half", flush=True)
            sys.stdin.readline()
            for value in values[half:]:
                writer.send(task["topic"], value.encode())
            return writer.finish_branch().to_json()
    except TailraceError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Write what the input asks for."""
    while line := sys.stdin.readline():
        print(write(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
