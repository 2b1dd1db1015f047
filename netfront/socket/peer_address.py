"""Address of the other end of a connection. Loaded by what shows it."""

from __future__ import annotations

import os
import socket
import struct


def address_of_peer(fd: int) -> str:
    """HOST:PORT of the other end of a connection, or uid and pid behind a Unix socket. Raises
    OSError.
    """
    with socket.socket(fileno=os.dup(fd)) as end:
        if end.family == socket.AF_UNIX:
            pid, uid, _ = struct.unpack(
                "3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            return f"uid={uid} pid={pid}"
        host, port = end.getpeername()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
