"""Contexts: names for addresses of appliances, in one JSON file of the user's configuration
directory.

Owner: the user's own commands, and clients that learn server keys. A lock on the directory makes
changes by commands exclusive, one on the file those by clients.
Invariants:
- The file is complete at any time: it is written beside its place, synced and renamed.
- Only its user can read the file, for it may have secret keys.
- Fields of a later version are kept. A damaged file is refused and never overwritten.

    {"format": 1, "current": "prod" or null,
     "contexts": {"prod": {"bootstrap": "tcp://10.0.0.5:7420"}}}

A context of `tailrace user add --out` also has `user`, `server_keys`, `public_key` and
`secret_key` (`tailrace.client.connections.credentials`).

A command uses the first of these addresses: --bootstrap, TAILRACE_BOOTSTRAP, the context that
TAILRACE_CONTEXT names, the context in use, the default.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import click
import orjson

from tailrace.client.config.settings import DEFAULT_BOOTSTRAP
from tailrace.client.connections.credentials import SCHEME, contexts_path
from tailrace.format.directory import change_lock

CONTEXT_VARIABLE = "TAILRACE_CONTEXT"
FORMAT = 1
FILE_MAX_BYTES = 1 << 20
"""Largest size of the file: thousands of contexts."""
NAME_MAX = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_MAX - 1}}}", re.ASCII)
_ADDRESS = re.compile(r"(tcp://)?([^\s/:]+|\[[0-9a-fA-F:.]+\]):\d{1,5}|ipc://\S+", re.ASCII)


@dataclass(slots=True)
class Contexts:
    """Content of the contexts file."""

    current: str | None = None
    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)

    def chosen(self) -> str | None:
        """The name of the context that a command uses; None if there is none.

        Raises: UsageError if TAILRACE_CONTEXT names an unknown one.
        """
        requested = os.environ.get(CONTEXT_VARIABLE)
        if not requested:
            return self.current
        if is_file(requested):
            return requested
        if requested not in self.by_name:
            raise click.UsageError(f"{CONTEXT_VARIABLE} is {requested!r}; {self._known()}")
        return requested

    def get(self, name: str) -> dict[str, Any]:
        """Raises UsageError when there is no such context."""
        if name not in self.by_name:
            raise click.UsageError(f"there is no context {name!r}; {self._known()}")
        return self.by_name[name]

    def _known(self) -> str:
        if not self.by_name:
            return (
                "there are none yet; make one with `tailrace context add NAME --bootstrap ADDRESS`"
            )
        return f"known are {', '.join(sorted(self.by_name))}"


def load() -> Contexts:
    """Read the contexts file; without one, return no contexts.

    Raises:
    - ClickException when the file is damaged or of a later version.
    - OSError when it cannot be read.
    """
    path = contexts_path()
    try:
        data = _read(path)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _damaged(path, str(error)) from None
    if (
        isinstance(content, dict)
        and isinstance(content.get("format"), int)
        and content["format"] > FORMAT
    ):
        raise click.ClickException(
            f"{path} was written by a later version of tailrace; use that version, or "
            "--bootstrap ADDRESS"
        )
    reason = _wrong_with(content)
    if reason:
        raise _damaged(path, reason)
    return Contexts(content["current"], content["contexts"])


def _read(path: str) -> bytes:
    """Read the file.

    Raises: ClickException if it is not a regular file or too large; OSError.
    """
    # Do not wait for a pipe: completions read the file too.
    with open(
        path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    ) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _damaged(path, "it is not a regular file")
        data = file.read(FILE_MAX_BYTES + 1)
    if len(data) > FILE_MAX_BYTES:
        raise _damaged(path, f"it has more than {FILE_MAX_BYTES} bytes")
    return data


def _wrong_with(content: Any) -> str:
    """The first fault of a parsed contexts file; "" if it is valid."""
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or not isinstance(content.get("contexts"), dict)
    ):
        return "format or contexts is missing"
    for name, context in content["contexts"].items():
        if (
            not isinstance(context, dict)
            or not isinstance(context.get("bootstrap"), str)
            or not _ADDRESS.fullmatch(context["bootstrap"])
        ):
            return f"context {name!r} has no address"
    current = content.setdefault("current", None)
    if current is not None and (not isinstance(current, str) or current not in content["contexts"]):
        return f"the current context {current!r} does not exist"
    return ""


def _damaged(path: str, reason: str) -> click.ClickException:
    return click.ClickException(
        f"{path} is damaged: {reason}. Correct it, or move it away and add your contexts again. "
        "--bootstrap ADDRESS works without it"
    )


@contextmanager
def changing() -> Iterator[Contexts]:
    """Change the contexts in the block; write them when it ends without an error.

    Raises: ClickException, OSError.
    """
    directory = os.path.dirname(contexts_path())
    os.makedirs(directory, mode=0o700, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with ExitStack() as stack:
            with suppress(FileNotFoundError):  # the first change makes the file
                stack.enter_context(change_lock.changing(contexts_path()))
            contexts = load()
            yield contexts
            _write(contexts)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(contexts: Contexts) -> None:
    path = os.path.realpath(contexts_path())  # keep a symbolic link to the file
    content = {"format": FORMAT, "current": contexts.current, "contexts": contexts.by_name}
    beside = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(beside)  # left by a killed command; the lock is held
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(
                orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def is_file(name: str) -> bool:
    """True if a context is the path of a file, not a name."""
    return os.sep in name or name.endswith(".context")


def check_name(name: str) -> None:
    """Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise click.UsageError(
            f"{name!r} cannot name a context; write up to {NAME_MAX} letters, digits, '.', '_' "
            "and '-'"
        )


def check_address(address: str) -> None:
    """Raises UsageError."""
    if not _ADDRESS.fullmatch(address):
        raise click.UsageError(
            f"{address!r} is not an address; write tcp://HOST:PORT, HOST:PORT or ipc://PATH"
        )


def chosen_bootstrap() -> str:
    """The address for commands without --bootstrap and TAILRACE_BOOTSTRAP.

    Raises: ClickException, OSError.
    """
    contexts = load()
    name = contexts.chosen()
    if name is None:
        return DEFAULT_BOOTSTRAP
    if is_file(name):
        return f"{SCHEME}{name}"
    has_keys = "secret_key" in contexts.by_name[name]
    return f"{SCHEME}{name}" if has_keys else str(contexts.by_name[name]["bootstrap"])
