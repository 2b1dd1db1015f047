"""One message never ends a process: where what a handler did not expect becomes an answer, a log line and a count.

Every agent that takes messages consumes one, handles it, and gives what is raised there to `Boundary.caught`. Erlang's "let it crash" does not fit here: a
process that dies of a message is followed by one that reads the same message.

Owner: the agent's process; in shared memory its INTERNAL_ERRORS word.
Invariants: each failure has an id of its own in this run, which stands in the log line and in the answer; nothing that a peer sent is logged beyond
    WHAT_MAX characters.
Crash: nothing is kept but the count, which a successor goes on with.
"""

from __future__ import annotations

import logging
import traceback

from shm.control import ProcessSlot
from shm.layout import ProcessWord
from shm.runtime.process import process_name

logger = logging.getLogger(__name__)

WHAT_MAX = 300
FRAMES_SHOWN = 6


class Boundary:
    """Of one process."""

    def __init__(self, slot: ProcessSlot) -> None:
        self._slot = slot

    def caught(self, what: str, error: Exception) -> str:
        """Say and count a failure that nobody expected; returns the sentence for the peer. `what`: which message it was, as key=value pairs."""
        count = self._slot.load(ProcessWord.INTERNAL_ERRORS) + 1
        self._slot.store(ProcessWord.INTERNAL_ERRORS, count)
        identity = f"{process_name(self._slot.role, self._slot.index)}.{self._slot.load(ProcessWord.GENERATION)}.{count}"
        reason = f"{type(error).__name__}: {error}"[:WHAT_MAX]
        logger.error("internal_error id=%s %s reason=%r at=%s", identity, what[:WHAT_MAX], reason, _where(error))
        return f"the appliance failed in handling this ({type(error).__name__}); its log tells more under id={identity}"


def _where(error: Exception) -> str:
    """The innermost places of a traceback on one line, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES_SHOWN:]
    return "<".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames))
