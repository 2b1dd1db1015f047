"""Error handler of agents: turns an unexpected exception into an error response, a log line and a
count.

Every agent consumes a message, handles it, and passes exceptions to `CountedErrorHandler.on_error`.
Erlang's "let it crash" does not fit: a restarted process would read the same message again.

Owner: the agent's process; in shared memory its INTERNAL_ERRORS word.

Invariants:
- Each failure has an id that is unique in this run and appears in the log line and in the response.
- Of a peer's data, at most CONTEXT_MAX characters are logged.

Crash: only the count is kept. The successor continues it.
"""

from __future__ import annotations

import logging
import traceback

from shm.memory.layout import ProcessWord
from shm.runtime.agent_runner import process_name
from shm.tables.control import ProcessSlot

logger = logging.getLogger(__name__)

CONTEXT_MAX = 300
FRAMES_SHOWN = 6


class CountedErrorHandler:
    """Error handler of one process."""

    def __init__(self, slot: ProcessSlot) -> None:
        self._slot = slot

    def on_error(self, context: str, error: Exception) -> str:
        """Log and count an unexpected error. Return the message for the peer.

        `context` names the handled message, as key=value pairs.
        """
        count = self._slot.load(ProcessWord.INTERNAL_ERRORS) + 1
        self._slot.store(ProcessWord.INTERNAL_ERRORS, count)
        process = process_name(self._slot.role, self._slot.index)
        identity = f"{process}.{self._slot.load(ProcessWord.GENERATION)}.{count}"
        reason = f"{type(error).__name__}: {error}"[:CONTEXT_MAX]
        logger.error(
            "internal_error id=%s %s reason=%r at=%s",
            identity, context[:CONTEXT_MAX], reason, _where(error),
        )  # fmt: skip
        return (
            f"internal error ({type(error).__name__}); the appliance's log has the details under "
            f"id={identity}"
        )


def _where(error: Exception) -> str:
    """Return the innermost frames of a traceback on one line, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES_SHOWN:]
    return "<".join(
        f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames)
    )
