"""Very many connections that say nothing: `python -P -m bench.at_rest.idle_connections ADDRESS
COUNT` opens them and prints `open N`; they close with its input.

Each is a plain socket that speaks ZMTP 3.0 (NULL) by hand, with the handshake of our protocol: a
library's context has sockets, threads and descriptors of its own for each, and 10,000 of those
would be measured in its place. Nothing reads them again: what the kernel holds of an idle
connection's pushes is little.
"""

from __future__ import annotations

import resource
import socket
import struct
import sys

from tailrace.protocol.frame import RESPONSE_HEADER_BYTES
from tailrace.protocol.session import ClientSession

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
TYPE = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = b"\x04" + bytes([6 + len(TYPE)]) + b"\x05READY" + TYPE
OTHER_DESCRIPTORS = 64


def frames(parts: list[bytes]) -> bytes:
    """A message as ZMTP 3.0 writes it."""
    text = b""
    for number, part in enumerate(parts):
        more = number + 1 < len(parts)
        text += (
            bytes([more, len(part)]) if len(part) < 256 else struct.pack(">BQ", more | 2, len(part))
        ) + part
    return text


def connect(host: str, port: int) -> socket.socket:
    """A connection whose handshake was answered. Raises OSError, ConnectionError when the appliance
    closes it.
    """
    connection = socket.create_connection((host, port), 10)
    try:
        connection.sendall(GREETING + READY)
        _receive(connection, len(GREETING) + len(READY))  # ZMTP: no message before both are ready
        connection.sendall(frames([bytes(part) for part in ClientSession("idle").start()]))
        _receive(connection, RESPONSE_HEADER_BYTES)
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, at_least: int) -> None:
    while at_least > 0:
        part = connection.recv(65536)
        if not part:
            raise ConnectionError("the appliance closed it")
        at_least -= len(part)


def main() -> int:
    host, _, port = sys.argv[1].removeprefix("tcp://").rpartition(":")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: list[socket.socket] = []
    reason = ""
    while len(held) < int(sys.argv[2]) and not reason:
        try:
            held.append(connect(host, int(port)))
        except OSError as error:
            reason = str(error) or type(error).__name__
    print("open", len(held), reason, flush=True)
    sys.stdin.read()
    closed = sum(_is_closed(connection) for connection in held)
    print("closed", closed, flush=True)
    return 0


def _is_closed(connection: socket.socket) -> bool:
    """True if the appliance has ended the connection meanwhile."""
    connection.setblocking(False)
    try:
        while data := connection.recv(65536):
            del data
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    sys.exit(main())
