"""A configuration file: its settings, and the line of each.

Owner: pure, except for `read`.
Invariants:
- A file is read as a whole before anything of it is used.
- A file that changed while it was read is read again.
- A path that is not a regular file is refused without waiting for it (a FIFO would block).

tomllib does not tell where a key stands. `lines` finds out by giving it the statements one by one:
a statement ends at the first line break where tomllib takes it.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from functools import cached_property
from typing import Any, NamedTuple

SIZE_MAX_BYTES = 1 << 20
_READS_MAX = 3
_STATEMENT_LINES_MAX = 200
"""Lines of a longer statement are not told: each line would cost a parse of all before it."""
_NULL_DEVICE = os.makedev(1, 3)
_AT_LINE = re.compile(r"\s*\(at line (\d+), column (\d+)\)$")
_DUPLICATES = ("Cannot overwrite a value", "Cannot declare", "Cannot mutate")
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe, which cannot be read again at a reload"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class FileProblem(Exception):
    """A file that cannot be used. `line` is 0 if it concerns all of it."""

    def __init__(self, path: str, sentence: str, line: int = 0) -> None:
        super().__init__(sentence)
        self.path = path
        self.sentence = sentence
        self.line = line


class Statement(NamedTuple):
    """A table's header, or a key with its value."""

    line: int
    name: str
    """The key with its table, dotted."""
    is_table: bool


class TomlFile:
    """A file that was read."""

    def __init__(self, path: str, text: str) -> None:
        """Raises FileProblem if it is not valid TOML."""
        self.path = path
        self._text = text.replace("\r\n", "\n")
        try:
            self.values: list[tuple[str, Any]] = flattened(tomllib.loads(self._text))
            """(setting, value), in the order of the file."""
        except tomllib.TOMLDecodeError as error:
            raise self._syntax_problem(str(error)) from None
        except RecursionError:
            raise FileProblem(path, "is not valid TOML: it is nested too deeply") from None
        except ValueError:  # of int, which takes 4,300 digits at most
            raise FileProblem(path, "has a number with too many digits") from None

    def line_of(self, name: str) -> int:
        """The line where a setting is given; 0 if it is not."""
        return self.lines.get(name, 0)

    @cached_property
    def lines(self) -> dict[str, int]:
        """Setting -> line, from 1 on."""
        return {s.name: s.line for s in statements(self._text) if not s.is_table}

    def _syntax_problem(self, message: str) -> FileProblem:
        place = _AT_LINE.search(message)
        reason = (
            message[: place.start()] if place else message.removesuffix(" (at end of document)")
        )
        if reason.startswith(_DUPLICATES):
            seen: dict[str, int] = {}
            for found in statements(self._text):
                if found.name in seen:
                    return FileProblem(
                        self.path,
                        f"{found.name} is given twice, on line {seen[found.name]} too: remove one",
                        found.line,
                    )
                seen[found.name] = found.line
        line = int(place[1]) if place else self._text.rstrip("\n").count("\n") + 1
        column = f", column {place[2]}" if place else ", where the file ends"
        return FileProblem(self.path, f"is not valid TOML{column}: {reason}", line)


def read(path: str) -> TomlFile:
    """Read a file. Raises FileProblem."""
    for _ in range(_READS_MAX):
        before, content = _read_once(path)
        try:
            after = os.stat(path)
        except OSError as error:
            raise FileProblem(path, f"cannot be read: {error.strerror}") from None
        if _version(before) == _version(after):
            break
    else:
        raise FileProblem(path, "is being written: try again when it is complete")
    try:
        return TomlFile(path, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise FileProblem(
            path,
            f"is not valid TOML: byte 0x{content[error.start]:02x} is not UTF-8; save the file "
            "as UTF-8",
            line,
        ) from None


def _read_once(path: str) -> tuple[os.stat_result, bytes]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FileProblem(path, _unreadable(path, error)) from None
    try:
        state = os.fstat(fd)
        if stat.S_ISCHR(state.st_mode) and state.st_rdev == _NULL_DEVICE:
            return state, b""
        for is_kind, kind in _KINDS:
            if is_kind(state.st_mode):
                raise FileProblem(path, f"is {kind}; give a file")
        if state.st_size > SIZE_MAX_BYTES:
            raise FileProblem(
                path,
                f"has {state.st_size} bytes; a configuration has at most {SIZE_MAX_BYTES}",
            )
        return state, b"".join(iter(lambda: os.read(fd, SIZE_MAX_BYTES + 1), b""))
    except OSError as error:
        raise FileProblem(path, _unreadable(path, error)) from None
    finally:
        os.close(fd)


def _unreadable(path: str, error: OSError) -> str:
    reason = f"cannot be read: {error.strerror}"
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return f"{reason}; it is a link to {os.readlink(path)}, which is missing"
    if isinstance(error, PermissionError):
        return f"{reason}; let this user read it, or give another file with --config"
    return reason


def _version(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def flattened(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of every value in tables within tables."""
    result = []
    for name, value in table.items():
        if isinstance(value, dict):
            result += flattened(value, f"{prefix}{name}.")
        else:
            result.append((prefix + name, value))
    return result


def statements(text: str) -> list[Statement]:
    """The statements of a file. Ends before one that is not valid, or has too many lines."""
    found: list[Statement] = []
    table, start, chunk = "", 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        if not chunk and (not line.strip() or line.lstrip().startswith("#")):
            continue
        start = start if chunk else number
        if number - start >= _STATEMENT_LINES_MAX:
            return found
        chunk += line + "\n"
        try:
            given = tomllib.loads(chunk)
        except ValueError:
            continue  # it goes on in the next line, or has a number that is no int
        except RecursionError:
            return found
        is_table = chunk.lstrip().startswith("[")
        names = _header_name(given) if is_table else [name for name, _ in flattened(given)]
        if is_table:
            table = f"{names[0]}."
            found.append(Statement(start, names[0], True))
        else:
            found += [Statement(start, table + name, False) for name in names]
        chunk = ""
    return found


def _header_name(given: dict[str, Any]) -> list[str]:
    """The dotted name of a table from its header alone."""
    parts: list[str] = []
    table: Any = given
    while isinstance(table, dict) and table:
        [(name, table)] = table.items()
        parts.append(name)
        if isinstance(table, list):
            table = table[0]
    return [".".join(parts)]
