"""Contexts: appliances by name, so that commands find theirs without an address on each line. One JSON file in the user's configuration directory.

Owner: the user's own commands; changes are made one after the other, under a lock on the directory.
Invariants: the file is whole at any time (written beside it, synced, renamed) and only its user can read it: credentials will be kept in it. What a later
    version has put into a context is kept. A file that is damaged is refused and never written over.

    {"format": 1, "current": "prod" or null, "contexts": {"prod": {"bootstrap": "tcp://10.0.0.5:7420"}}}

Which appliance a command speaks to: --bootstrap, else TAILRACE_BOOTSTRAP, else the context that TAILRACE_CONTEXT names, else the one in use, else the default.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import click
import orjson

from tailrace.settings import DEFAULT_BOOTSTRAP

CONTEXT_VARIABLE = "TAILRACE_CONTEXT"
FORMAT = 1
FILE_MAX_BYTES = 1 << 20
"""Thousands of contexts."""
NAME_MAX = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_MAX - 1}}}", re.ASCII)
_ADDRESS = re.compile(r"(tcp://)?([^\s/:]+|\[[0-9a-fA-F:.]+\]):\d{1,5}|ipc://\S+", re.ASCII)


@dataclass(slots=True)
class Contexts:
    """What the file says."""

    current: str | None = None
    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)

    def chosen(self) -> str | None:
        """The name of the context that a command uses now; None: of none. Raises UsageError when TAILRACE_CONTEXT names one that there is not."""
        wanted = os.environ.get(CONTEXT_VARIABLE)
        if not wanted:
            return self.current
        if wanted not in self.by_name:
            raise click.UsageError(f"{CONTEXT_VARIABLE} is {wanted!r}; {self._known()}")
        return wanted

    def get(self, name: str) -> dict[str, Any]:
        """Raises UsageError when there is no such context."""
        if name not in self.by_name:
            raise click.UsageError(f"there is no context {name!r}; {self._known()}")
        return self.by_name[name]

    def _known(self) -> str:
        if not self.by_name:
            return "there are none yet; make one with `tailrace context add NAME --bootstrap ADDRESS`"
        return f"known are {', '.join(sorted(self.by_name))}"


def contexts_path() -> str:
    """Where the file is, whether it exists or not."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # as the XDG specification asks
        base = os.path.expanduser("~/.config")
    return os.path.join(base, "tailrace", "contexts.json")


def load() -> Contexts:
    """What there is; nothing where there is no file. Raises ClickException when it is damaged, or of a later version; OSError."""
    path = contexts_path()
    try:
        data = _read(path)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _damaged(path, str(error)) from None
    if isinstance(content, dict) and isinstance(content.get("format"), int) and content["format"] > FORMAT:
        raise click.ClickException(f"{path} was written by a later version of tailrace; use that one, or --bootstrap ADDRESS")
    reason = _wrong_with(content)
    if reason:
        raise _damaged(path, reason)
    return Contexts(content["current"], content["contexts"])


def _read(path: str) -> bytes:
    """The file's bytes. Raises ClickException where it is no file or too large; OSError."""
    # A pipe is not waited for: pressing the tab key comes here too.
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _damaged(path, "it is no file")
        data = file.read(FILE_MAX_BYTES + 1)
    if len(data) > FILE_MAX_BYTES:
        raise _damaged(path, f"it has more than {FILE_MAX_BYTES} bytes")
    return data


def _wrong_with(content: Any) -> str:
    """Why this is not what such a file holds; empty: it is."""
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("contexts"), dict):
        return "it has no format and contexts"
    for name, context in content["contexts"].items():
        if not isinstance(context, dict) or not isinstance(context.get("bootstrap"), str) or not _ADDRESS.fullmatch(context["bootstrap"]):
            return f"context {name!r} has no address"
    current = content.setdefault("current", None)
    if current is not None and (not isinstance(current, str) or current not in content["contexts"]):
        return f"the current context {current!r} is not there"
    return ""


def _damaged(path: str, reason: str) -> click.ClickException:
    return click.ClickException(
        f"{path} is damaged: {reason}. Correct it, or move it away and add your contexts again; --bootstrap ADDRESS works without it"
    )


@contextmanager
def changing() -> Iterator[Contexts]:
    """What there is, to be changed in the block; written when the block ends without an error. Raises ClickException, OSError."""
    directory = os.path.dirname(contexts_path())
    os.makedirs(directory, mode=0o700, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        contexts = load()
        yield contexts
        _write(contexts)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(contexts: Contexts) -> None:
    path = os.path.realpath(contexts_path())  # a link into a repository of settings stays one
    content = {"format": FORMAT, "current": contexts.current, "contexts": contexts.by_name}
    beside = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(beside)  # of a command that was killed; the lock is held
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def check_name(name: str) -> None:
    """Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise click.UsageError(f"{name!r} is no name of a context; write up to {NAME_MAX} letters, digits, '.', '_' and '-'")


def check_address(address: str) -> None:
    """Raises UsageError."""
    if not _ADDRESS.fullmatch(address):
        raise click.UsageError(f"{address!r} is no address; write tcp://HOST:PORT, HOST:PORT or ipc://PATH")


def chosen_bootstrap() -> str:
    """The address where neither --bootstrap nor TAILRACE_BOOTSTRAP gives one. Raises ClickException, OSError."""
    contexts = load()
    name = contexts.chosen()
    return DEFAULT_BOOTSTRAP if name is None else str(contexts.by_name[name]["bootstrap"])
