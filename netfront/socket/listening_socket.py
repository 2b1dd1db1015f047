"""Listening socket of a front: a ROUTER socket with its options, bound to the front's addresses.

Owner: one front's `Router`.
"""

from __future__ import annotations

import zmq

QUEUE_MESSAGES = 4096
"""Queued messages of one connection, in each direction."""
ZMTP_HANDSHAKE_MS = 10_000
DEAD_HOST_S = 30
KEEPALIVE_S = 5


class AddressInUseError(RuntimeError):
    """Another process listens on the address."""


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
    _set_keepalive(socket)
    socket.copy_threshold = 0
    return socket


def listen(socket: zmq.Socket[bytes], addresses: list[str]) -> int:
    """Bind the socket to all `addresses`. Return the port of the first TCP address, 0 without one.

    Raises AddressInUseError.
    """
    port = 0
    for address in addresses:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise AddressInUseError(
                f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}. Stop what "
                "uses it, or choose another with --listen."
            ) from None
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if address.startswith("tcp://") and not port:
            port = int(bound.rpartition(":")[2])
    return port
