"""Listening socket of a front: a ROUTER socket with its options, bound to the front's addresses.

Owner: one front's `Router`.
"""

from __future__ import annotations

import errno
import os
import socket as unix
from collections.abc import Mapping
from typing import NamedTuple

import zmq

QUEUE_MESSAGES = 4096
"""Queued messages of one connection, in each direction."""
ZMTP_HANDSHAKE_MS = 10_000
BACKLOG = 4_096
"""Connections that the kernel has made and libzmq has not accepted. Beyond it the kernel drops
requests for connections, and a client repeats its own after a second. libzmq's default of 100 is
full in 10 ms when strangers knock.
"""
DEAD_HOST_S = 30
KEEPALIVE_S = 5


_OTHER_ADVICE = "Stop what uses it, or choose another with --listen."
_ADVICE = {
    errno.ENOENT: "Make the directory of the socket, or choose another with --listen.",
    errno.EACCES: "The appliance's user must be able to write to the directory of the socket, and "
    "ports below 1024 need CAP_NET_BIND_SERVICE; or choose another with --listen.",
    errno.ENODEV: "No interface of this host has the address; choose another with --listen.",
}


class AddressInUseError(RuntimeError):
    """The address cannot be listened on; mostly another process does."""


class SocketAccess(NamedTuple):
    """Access to a Unix socket."""

    mode: int
    gid: int
    """-1: the process's own group."""


class ListeningSockets(NamedTuple):
    """The sockets of a front: access to those that it makes, and those that it is given."""

    access: SocketAccess
    by_address: Mapping[str, int]
    """Descriptor of a socket that listens at the address already."""


NONE_GIVEN = ListeningSockets(SocketAccess(0o600, -1), {})


def begin_zero_copy(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Send one zero-copy message inside this process. pyzmq's first zero-copy send imports a module
    and starts a thread with sockets. Later there may be no descriptors for them, and the front
    would end.
    """
    with context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.copy_threshold = 0
        one.bind("inproc://zero-copy")
        other.connect("inproc://zero-copy")
        sent = one.send(b"x", copy=False, track=True)
        other.recv()
        assert sent is not None
        sent.wait()


def _set_keepalive(socket: zmq.Socket[bytes]) -> None:
    """Close connections whose host has not responded for DEAD_HOST_S.

    ZMTP heartbeats cannot be used. If a peer with a full queue disappears, libzmq 4.3.5 writes the
    next heartbeat into the closed connection and aborts the process (`!_io_error`, libzmq issue
    4841).
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, DEAD_HOST_S // KEEPALIVE_S - 1)
    socket.setsockopt(zmq.TCP_MAXRT, DEAD_HOST_S * 1000)


def new_socket(
    context: zmq.Context[zmq.Socket[bytes]], message_max_bytes: int
) -> zmq.Socket[bytes]:
    """Return an unbound socket. `message_max_bytes` is the largest frame accepted."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, message_max_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, ZMTP_HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    _set_keepalive(socket)
    socket.copy_threshold = 0
    return socket


def listen(
    socket: zmq.Socket[bytes],
    addresses: list[str],
    given: ListeningSockets = NONE_GIVEN,
    secret_key: str = "",
) -> int:
    """Bind the socket to all `addresses`. Return the port of the first TCP address, 0 without one.
    With the server's `secret_key` (Z85) connections over TCP are encrypted, and no others accepted.

    Raises AddressInUseError.
    """
    port = 0
    for address in addresses:
        if secret_key:  # a listening socket keeps the options of its beginning
            is_tcp = address.startswith("tcp://")
            socket.setsockopt(zmq.CURVE_SERVER, int(is_tcp))
            if is_tcp:
                socket.setsockopt_string(zmq.CURVE_SECRETKEY, secret_key)
        path, access = _socket_path(address), given.access
        fd = given.by_address.get(address, -1)
        try:
            socket.setsockopt(zmq.USE_FD, fd)  # -1: libzmq makes a socket; it closes either
            if path is None or fd >= 0:
                socket.bind(address)
            else:
                _bind_path(socket, path, access)
        except zmq.ZMQError as error:
            raise AddressInUseError(
                f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}. "
                f"{_ADVICE.get(error.errno or 0, _OTHER_ADVICE)}"
            ) from None
        except OSError as error:
            raise AddressInUseError(
                f"cannot listen on {address}: its socket cannot have group {access.gid} and mode "
                f"{access.mode:04o}: {error.strerror}. Check ipc.group and ipc.mode."
            ) from None
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if address.startswith("tcp://") and not port:
            port = int(bound.rpartition(":")[2])
    return port


def _socket_path(address: str) -> str | None:
    """The path of an ipc address. None for TCP, and for a name without a file (`ipc://@name`)."""
    path = address.removeprefix("ipc://")
    return None if path == address or path.startswith("@") else path


def _bind_path(socket: zmq.Socket[bytes], path: str, access: SocketAccess) -> None:
    """Bind to a Unix socket that only its owner can use until it has its group and mode.

    libzmq replaces a socket that exists, also one of a running program. Raises zmq.ZMQError,
    OSError.
    """
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM | unix.SOCK_NONBLOCK) as probe:
        if probe.connect_ex(path) == 0:
            raise zmq.ZMQError(errno.EADDRINUSE)
    before = os.umask(0o177)
    try:
        socket.bind(f"ipc://{path}")
    finally:
        os.umask(before)
    os.chown(path, -1, access.gid)
    os.chmod(path, access.mode)
