"""Control socket: takes an operator's commands to a running appliance, from this host alone.

    request    one line of JSON, {"command": "restart", "processes": ["front-0"]}
    answers    lines of JSON: any number of events, then one with "done": true, or with "error"

Owner: the supervisor. The socket is `control.sock` in the first data directory, mode 0600. Root and
the supervisor's own user may connect.
Invariants:
- Nothing here blocks or raises. A client that does not read is disconnected.
- A client's end ends nothing that it has asked for.
Crash: the next start replaces the socket's file.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import orjson

from tailrace.format.directory.data_dir import CONTROL_SOCKET

logger = logging.getLogger("appliance.supervise.supervisor")

CLIENTS_MAX = 16
LINE_MAX_BYTES = 64 << 10
_CREDENTIALS = struct.Struct("3i")


def address_of(directory_fd: int) -> str:
    """Path of the socket in an open data directory. The directory's own path may exceed the 108
    bytes that an address has.
    """
    return f"/proc/self/fd/{directory_fd}/{CONTROL_SOCKET}"


class ControlClient:
    """One connection, and the command that came over it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection: socket.socket | None = connection
        self._received = b""

    def fileno(self) -> int:
        """The descriptor; -1 if it is closed."""
        return -1 if self._connection is None else self._connection.fileno()

    def read(self) -> dict[str, Any] | None:
        """The command, once it has come; None before. A wrong one is answered, and closed."""
        if self._connection is None:
            return None
        try:
            piece = self._connection.recv(LINE_MAX_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        self._received += piece
        line, separator, self._received = self._received.partition(b"\n")
        if not separator:
            self._received = line
            if not piece or len(line) >= LINE_MAX_BYTES:
                self.close()
            return None
        try:
            command = orjson.loads(line)
        except orjson.JSONDecodeError:
            command = None
        if not isinstance(command, dict):
            self.fail("a command is one line with a JSON object")
            return None
        return command

    def send(self, event: dict[str, Any]) -> None:
        """Send one event. A client that does not read it is disconnected."""
        if self._connection is None:
            return
        data = orjson.dumps(event) + b"\n"
        try:
            if self._connection.send(data, socket.MSG_NOSIGNAL) < len(data):
                self.close()
        except OSError:
            self.close()

    def finish(self, event: dict[str, Any]) -> None:
        """Send the last event, and close."""
        self.send({**event, "done": True})
        self.close()

    def fail(self, reason: str) -> None:
        """Refuse the command, or end it, with a sentence."""
        self.send({"error": reason})
        self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class ControlSocket:
    """The listening socket and its clients."""

    def __init__(self, directory_fd: int, path: str) -> None:
        """`directory_fd`: the first data directory, `path`: its name in log lines."""
        self._clients: list[ControlClient] = []
        self._directory_fd = directory_fd
        self._listener: socket.socket | None = None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._remove()
            umask = os.umask(0o177)
            try:
                listener.bind(address_of(directory_fd))
            finally:
                os.umask(umask)
            listener.listen(CLIENTS_MAX)
            listener.setblocking(False)
        except OSError as error:  # everything serves without it
            listener.close()
            logger.warning(
                "no_control_socket path=%s/%s error=%r so='tailrace restart has no effect'",
                path, CONTROL_SOCKET, str(error),
            )  # fmt: skip
            return
        self._listener = listener

    def _remove(self) -> None:
        try:
            os.unlink(CONTROL_SOCKET, dir_fd=self._directory_fd)
        except FileNotFoundError:
            pass

    def fds(self) -> Iterator[int]:
        """Descriptors to poll for reading."""
        if self._listener is not None:
            yield self._listener.fileno()
        yield from (client.fileno() for client in self._clients if client.fileno() >= 0)

    def commands(self) -> Iterator[tuple[ControlClient, dict[str, Any]]]:
        """Accept clients, read, and return the commands that are complete."""
        self._accept()
        for client in self._clients:
            command = client.read()
            if command is not None:
                yield client, command
        self._clients = [client for client in self._clients if client.fileno() >= 0]

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
                found = connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
                )
            except OSError:
                return
            _, uid, _ = _CREDENTIALS.unpack(found)
            client = ControlClient(connection)
            if uid not in (0, os.geteuid()):
                client.fail("only root and the appliance's own user may control it")
            elif len(self._clients) >= CLIENTS_MAX:
                client.fail("too many programs control this appliance at a time; try again")
            else:
                self._clients.append(client)

    def close(self) -> None:
        """Close everything and remove the socket's file."""
        for client in self._clients:
            client.close()
        if self._listener is not None:
            self._listener.close()
            try:
                self._remove()
            except OSError:
                pass  # the next start removes it
        self._listener = None
