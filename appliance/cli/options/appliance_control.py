"""The command line's side of the control socket of an appliance on this host
(`appliance.supervise.operations.control_socket`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click
import orjson

from appliance.cli.options.shared import connect
from tailrace.core.errors import NotReachableError
from tailrace.format.directory.data_dir import CONTROL_SOCKET

Function = TypeVar("Function", bound=Callable[..., Any])
TIMEOUT_S = 90
"""Longest wait for one event. The supervisor gives a process a minute to serve."""


def data_dir_option(function: Function) -> Function:
    """Add the option --data-dir, the appliance's first data directory."""
    return click.option(
        "--data-dir",
        type=click.Path(file_okay=False),
        help="Data directory of the appliance, the first if it has several; default: as the "
        "appliance at --bootstrap says.",
    )(function)


def control_directory(data_dir: str | None, bootstrap: str) -> str:
    """The directory with the control socket. Raises NotReachableError if no appliance answers."""
    if data_dir is not None:
        return data_dir
    with connect(bootstrap) as admin:
        return str(admin.describe_cluster()["data_dirs"][0]["path"])


def ask(directory: str, command: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Send a command, and return its events as they come. Blocking.

    Raises NotReachableError without an appliance, ClickException for a refusal.
    """
    with _connected(directory) as connection, connection.makefile("rb") as lines:
        try:
            connection.sendall(orjson.dumps(command) + b"\n")
            for line in lines:
                event = orjson.loads(line)
                if "error" in event:
                    raise click.ClickException(str(event["error"]))
                yield event
                if event.get("done"):
                    return
        except OSError as error:
            raise NotReachableError(
                f"the appliance of {directory} does not answer: {error}"
            ) from None
    raise NotReachableError(f"the appliance of {directory} ended")


def _connected(directory: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # the path may be longer than a socket's address
            connection.connect(f"/proc/self/fd/{fd}/{CONTROL_SOCKET}")
        finally:
            os.close(fd)
    except OSError as error:
        connection.close()
        if isinstance(error, PermissionError):
            raise click.ClickException(
                f"no permission for {directory}/{CONTROL_SOCKET}: run this as root or as the user "
                "that the appliance runs as"
            ) from None
        raise NotReachableError(
            f"no appliance of this host serves {directory} ({error.strerror}); run this on the "
            "appliance's host, or name its directory with --data-dir"
        ) from None
    return connection
