"""Command line in `ps` of a process that was forked and runs another program than the one executed.

Owner: the process itself. The kernel placed the bytes when it executed the interpreter.
/proc/self/stat has their address (see proc(5)).

Invariants:
- No byte outside that place changes.
- The last byte stays zero. Otherwise the kernel would show the environment after it.
"""

from __future__ import annotations

from collections.abc import Sequence

_ARG_START, _ARG_END = 45, 46
"""Fields 48 and 49 of /proc/self/stat, counted from the one after the name in parentheses."""


def show_command_line(arguments: Sequence[str]) -> bool:
    """Make `ps` show `arguments`, cut to the length of the executed ones.

    Return True if the kernel allowed it.
    """
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if not 0 < start < end:
            return False
        room = end - start
        text = b"\0".join(argument.encode() for argument in arguments)[: room - 1]
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            return memory.write(text.ljust(room, b"\0")) == room
    except OSError:
        return False
