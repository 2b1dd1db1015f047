"""The handler of a process's log lines: a stream, or the journal with fields.

Owner: each process its own.
"""

from __future__ import annotations

import logging
import os
import stat
from typing import Any

from shm.runtime.logs.format import PriorityFormatter, is_journal, line_formatter


def handler(process: str, stream: Any, form: str = "text") -> logging.Handler:
    """Return the handler for lines that `process` writes to `stream`, or sends to the journal if
    `stream` is the journal's.
    """
    fd = stream.fileno()
    if not is_journal(fd):
        plain = logging.StreamHandler(stream)
        plain.setFormatter(line_formatter(process, form, with_time=True))
        return plain
    line = line_formatter(process, form, with_time=False)
    if stat.S_ISSOCK(os.fstat(fd).st_mode):
        from shm.runtime.logs.journal import JournalHandler  # services alone have a journal

        return JournalHandler(process, stream, line)
    piped = logging.StreamHandler(stream)
    piped.setFormatter(PriorityFormatter(line))
    return piped
