"""Reason why an `ipc://` socket cannot be used, found by connecting to it once.

ZeroMQ goes on trying in silence, whatever the kernel says. A client that has waited for a second
asks the kernel itself.
"""

from __future__ import annotations

import os
import socket
import stat

from tailrace.core.errors import NotReachableError

SCHEME = "ipc://"
PERMISSION_ADVICE = (
    "Ask an administrator to add you to that group (usermod -aG GROUP USER) and log in again, or "
    "to change ipc.mode and ipc.group of the appliance."
)
DIRECTORY_ADVICE = (
    "Ask an administrator for the right to enter the directory, as a member of its group, for "
    "example."
)


def permission_error(address: str) -> NotReachableError | None:
    """The error of a socket that this user may not use. None for other addresses and reasons."""
    path = _path(address)
    if path is None or _connect(path) is not PermissionError:
        return None
    try:
        found = os.stat(path)
    except OSError:
        error = NotReachableError(
            f"permission denied: user {_user(os.geteuid())} may not enter the directory of {path}"
        )
        error.advice = DIRECTORY_ADVICE
        return error
    error = NotReachableError(
        f"permission denied: user {_user(os.geteuid())} may not write to {path}, which belongs to "
        f"user {_user(found.st_uid)} and group {_group(found.st_gid)} and has mode "
        f"{stat.S_IMODE(found.st_mode):04o}"
    )
    error.advice = PERMISSION_ADVICE
    return error


def absence(address: str) -> str:
    """A clause about a socket that does not exist or that no process listens on; "" for others."""
    path = _path(address)
    reason = None if path is None else _connect(path)
    if reason is FileNotFoundError:
        return f"; there is no socket {path}"
    if reason is ConnectionRefusedError:
        return f"; no process listens on {path}, which is left from an earlier run"
    return ""


def _path(address: str) -> str | None:
    path = address.removeprefix(SCHEME)
    return path if path != address and path.startswith("/") else None


def _connect(path: str) -> type[OSError] | None:
    """Connect and close at once; the kind of error, None if a process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            return type(error)
    return None


def _user(number: int) -> str:
    import pwd  # only for an error

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
