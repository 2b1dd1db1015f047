"""Single keys from a terminal, without echo and without Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager


class Keyboard:
    """Keys as they are pressed."""

    def wait(self, timeout_s: float) -> str:
        """The next key, "" if none comes in time or there is no terminal to read."""
        if not sys.stdin.isatty():
            select.select([], [], [], timeout_s)
            return ""
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], timeout_s)
        return os.read(sys.stdin.fileno(), 1).decode("ascii", "ignore") if ready else ""


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Read keys during the block; the terminal is as before after it."""
    if not sys.stdin.isatty():
        yield Keyboard()
        return
    before = termios.tcgetattr(sys.stdin.fileno())
    tty.setcbreak(sys.stdin.fileno(), termios.TCSANOW)  # what was typed before counts
    try:
        yield Keyboard()
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)
