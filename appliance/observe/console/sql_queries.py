"""SQL queries of the page: `tailrace sql` in a process of its own, within limits.

Owner: the thread of a request starts the process and ends it.
Invariants:
- One query at a time; another is refused with a sentence.
- A query reads topics and nothing else: no file, no address (`--topics-only`). It changes nothing.
- Its rows, bytes, time and memory are bounded: its output is read no further than the bound, its
  process has DATA_MAX_BYTES, and is the first that the kernel ends when memory is short. DuckDB's
  memory and modules are gone with the process.
"""

from __future__ import annotations

import os
import resource
import selectors
import subprocess
import sys
import threading
import time
from typing import Any

import orjson

from tailrace.core.errors import InvalidRequestError, RequestTimeoutError

ROWS_MAX = 1_000
OUTPUT_MAX_BYTES = 8 << 20
TIMEOUT_S = 30.0
MEMORY = "512MiB"
DATA_MAX_BYTES = 3 << 30
"""Private memory of the process. MEMORY bounds what DuckDB keeps, not the rows on their way out."""
_PIECE_BYTES = 1 << 20


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
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            _bound(process.pid)
            output, errors = _read(process, time.monotonic() + TIMEOUT_S)
            return process.wait() if len(output) <= OUTPUT_MAX_BYTES else 0, output, errors
        finally:
            process.kill()


def _bound(pid: int) -> None:
    """Bound the memory of a process that has just begun."""
    try:
        resource.prlimit(pid, resource.RLIMIT_DATA, (DATA_MAX_BYTES, DATA_MAX_BYTES))
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write("1000")
    except (OSError, ValueError):
        pass  # it has ended, or has a lower bound already


def _read(process: subprocess.Popen[bytes], end_s: float) -> tuple[bytes, bytes]:
    """(output, errors) until both end, or one is longer than its bound. Raises
    RequestTimeoutError.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    found = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for descriptor in found:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, end_s - time.monotonic()))
            if not ready:
                raise RequestTimeoutError(
                    f"the query took more than {TIMEOUT_S:.0f} s and was ended; select less, or "
                    "run it by `tailrace sql`"
                )
            for key, _ in ready:
                piece = os.read(key.fd, _PIECE_BYTES)
                found[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
            if max(map(len, found.values())) > OUTPUT_MAX_BYTES:
                break
    output, errors = found.values()
    return bytes(output), bytes(errors)


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
