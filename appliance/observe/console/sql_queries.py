"""SQL queries of the page: `tailrace sql` in a process of its own, within limits.

Owner: the thread of a request starts the process and ends it.
Invariants:
- One query at a time; another is refused with a sentence.
- A query reads topics and nothing else: no file, no address (`--topics-only`). It changes nothing.
- Its rows, bytes, time and memory are bounded. DuckDB's memory and modules are gone with the
  process.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import orjson

from tailrace.core.errors import InvalidRequestError, RequestTimeoutError

ROWS_MAX = 1_000
OUTPUT_MAX_BYTES = 8 << 20
TIMEOUT_S = 30.0
MEMORY = "512MiB"


class SqlQueries:
    """Runs queries. Safe in any thread."""

    def __init__(self) -> None:
        self._is_free = threading.Lock()

    def run(self, address: str, query: str) -> dict[str, Any]:
        """Run a query. Returns {"rows": [...], "truncated": bool}. Raises TailraceError."""
        if not self._is_free.acquire(blocking=False):
            raise InvalidRequestError("another query of this console is running; wait for its end")
        try:
            return _answer(*_run(address, query))
        finally:
            self._is_free.release()


def _run(address: str, query: str) -> tuple[int, bytes, bytes]:
    """(exit status, output, errors) of the command. Raises RequestTimeoutError."""
    command = [
        sys.executable, "-P", "-m", "tailrace", "sql", "--json", "--topics-only",
        "--limit", str(ROWS_MAX + 1), "--memory", MEMORY, "--bootstrap", address, "--", query,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RequestTimeoutError(
            f"the query took more than {TIMEOUT_S:.0f} s and was ended; select less, or run it by "
            "`tailrace sql`"
        ) from None
    return done.returncode, done.stdout, done.stderr


def _answer(status: int, output: bytes, errors: bytes) -> dict[str, Any]:
    if status:
        text = errors.decode(errors="replace").strip().removeprefix("error: ")
        raise InvalidRequestError(text.removeprefix("Error: ")[-2_000:] or "the query failed")
    if len(output) > OUTPUT_MAX_BYTES:
        raise InvalidRequestError(
            f"the result has more than {OUTPUT_MAX_BYTES >> 20} MiB; select less, or run it by "
            "`tailrace sql`"
        )
    rows = orjson.loads(output) if output.strip() else []
    return {"rows": rows[:ROWS_MAX], "truncated": len(rows) > ROWS_MAX}
