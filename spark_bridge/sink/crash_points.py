"""Places where tests kill the driver of a query.

The environment variable TAILRACE_SINK_CRASH has `place` or `place:batch`. Places: `before_decision`
and `after_decision`.

Owner: tests; without the variable nothing happens.
"""

from __future__ import annotations

import os
import signal

CRASH_VARIABLE = "TAILRACE_SINK_CRASH"
BEFORE_DECISION, AFTER_DECISION = "before_decision", "after_decision"


def crash_point(place: str, batch_id: int) -> None:
    """Kill the driver here, if a test asks for it."""
    if os.environ.get(CRASH_VARIABLE, "") in (place, f"{place}:{batch_id}"):
        for process in _jvm() or [os.getpid()]:
            os.kill(process, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _jvm() -> list[int]:
    """Process id of the JVM that this process belongs to, if any."""
    process = os.getpid()
    while process > 1:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        if name == "java":
            return [process]
        process = int(rest.split()[1])
    return []
