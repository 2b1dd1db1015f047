"""Handshake probe: finds out why the appliance does not let a client in. libzmq reports a refused
handshake to a socket's monitor only, and a client has none.

A connection that is not made at once gets a probe: another socket that connects the same way, with
a monitor.

Owner: one `Connection`.

Invariants:
- A refusal is one of libzmq's events, or the server's own word about its mechanism, never a guess
  from silence. A connection that only breaks off is a refusal after BREAKS_MIN times, because a
  restart may break one off.
- libzmq's thread, which all clients of the process share, waits for ever to report an event that
  finds no room, or no reader. So the reader has no limit, and stays open until there are no more
  events, whatever interrupts the program.

Source: libzmq's zmq_socket_monitor(3). A server that cannot decrypt a client's first command closes
the connection: the client has another server's key.
"""

from __future__ import annotations

import itertools
import socket
import struct
import weakref
from typing import Any

import zmq

from tailrace.client.connections.credentials import Credentials

BREAKS_MIN = 2
RECONNECT_MS = 100
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
"""Signature and version of ZMTP 3.0, without the mechanism."""
_MECHANISM = slice(12, 32)
_EVENT = struct.Struct("=HI")
_MISMATCH = 0x11000002
"""ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH."""
_NO_DETAIL, _PROTOCOL, _AUTH, _SUCCEEDED = (
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH),
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED),
)
UNKNOWN_KEY = (
    "the appliance does not know the key of this context: the user was deleted, or its key was "
    "removed or is of another appliance"
)
OTHER_SERVER = (
    "the appliance there breaks the encrypted handshake off: its server key is not that of this "
    "context, so it is another appliance, or has a new key (`tailrace server-key show --data-dir "
    "DIR` on its host)"
)
NEEDS_KEY = (
    "the appliance there takes encrypted connections of its users only, and this client has no key"
)
TAKES_NO_KEY = (
    "the appliance there takes no encrypted connections: it has no users, or is another program; "
    "use its address without a context"
)

_numbers = itertools.count()
_watched: dict[int, tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = {}
"""By probe: the socket with a monitor, and the one that reads it. An interrupted program can lose a
probe, but not these.
"""


class HandshakeProbe:
    """One attempt to connect, and its events."""

    def __init__(self, address: str, credentials: Credentials | None) -> None:
        """Raises zmq.ZMQError, with nothing left open."""
        self._is_encrypted = credentials is not None
        self._breaks = 0
        self._monitor: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        try:
            self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        except zmq.ZMQError:
            self._monitor.close(0)
            raise
        self._peek = MechanismPeek(address)
        self._number = next(_numbers)
        _watched[self._number] = self._socket, self._monitor
        weakref.finalize(self, _close, self._number, self._peek).atexit = False
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            if credentials is not None:
                set_credentials(self._socket, credentials)
            # libzmq may know the name of an earlier monitor for a while: none is used again.
            name = f"inproc://handshake-probe-{self._number}"
            self._socket.monitor(name, _NO_DETAIL | _PROTOCOL | _AUTH | _SUCCEEDED)
            self._monitor.setsockopt(zmq.LINGER, 0)
            self._monitor.setsockopt(zmq.RCVHWM, 0)  # no limit
            self._monitor.connect(name)
            self._socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def refusal(self) -> str | None:
        """The reason of a refusal, once it is known. It does not wait."""
        mechanism = self._peek.mechanism()
        if mechanism == b"CURVE" and not self._is_encrypted:
            return NEEDS_KEY
        if mechanism == b"NULL" and self._is_encrypted:
            return TAKES_NO_KEY
        while True:
            try:
                frames: list[Any] = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            if len(frames[0]) != _EVENT.size:
                continue  # the rest of an event: the program was interrupted while it was read
            event, value = _EVENT.unpack(frames[0])
            if event == _AUTH:
                return UNKNOWN_KEY
            if event == _PROTOCOL and value == _MISMATCH:
                return TAKES_NO_KEY if self._is_encrypted else NEEDS_KEY
            self._breaks += event == _NO_DETAIL
        if self._is_encrypted and self._breaks >= BREAKS_MIN and mechanism == b"CURVE":
            return OTHER_SERVER
        return None

    def close(self) -> None:
        """Close all sockets. A call that was interrupted can be repeated."""
        _close(self._number, self._peek)


def _close(number: int, peek: MechanismPeek) -> None:
    """Close the sockets of a probe that are open: first there are no more events, then there is no
    reader.
    """
    peek.close()
    if number in _watched:
        watched, monitor = _watched[number]
        if not watched.closed:
            watched.disable_monitor()
            watched.close(0)
        monitor.close(0)
        _watched.pop(number, None)


def begin_probe(address: str, credentials: Credentials | None) -> HandshakeProbe | None:
    """Begin to find out why a handshake has no answer. None: there is no room for its sockets, and
    the client waits without a reason.
    """
    try:
        return HandshakeProbe(address, credentials)
    except zmq.ZMQError:
        return None


class MechanismPeek:
    """Reads the mechanism of a server's greeting, which libzmq does not tell: a server whose
    mechanism is another one closes the connection, perhaps before its greeting was read.

    The first bytes of a greeting are sent, and none that name a mechanism. So the server neither
    refuses nor accepts.
    """

    def __init__(self, address: str) -> None:
        self._mechanism: bytes | None = None
        self._received = b""
        self._is_sent = False
        self._socket: socket.socket | None = None
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        host = host.strip("[]").replace("localhost", "127.0.0.1")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            packed = socket.inet_pton(family, host)
            del packed
            self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._socket.connect_ex((host, int(port)))
        except (OSError, ValueError):
            self.close()  # a name: looking it up could block

    def mechanism(self) -> bytes | None:
        """The mechanism; None while it is unknown, or for ever. It does not wait."""
        if self._socket is None:
            return self._mechanism
        try:
            if not self._is_sent:
                self._socket.send(_GREETING)
                self._is_sent = True
            while len(self._received) < _MECHANISM.stop:
                piece = self._socket.recv(64)
                if not piece:
                    raise ConnectionResetError
                self._received += piece
        except BlockingIOError:
            return None
        except OSError:
            self.close()
            return None
        if self._received[:1] == b"\xff" and self._received[9:11] == b"\x7f\x03":
            self._mechanism = self._received[_MECHANISM].rstrip(b"\0")
        self.close()
        return self._mechanism

    def close(self) -> None:
        """Close the socket."""
        found, self._socket = self._socket, None
        if found is not None:
            found.close()


def set_credentials(socket: zmq.Socket[bytes], credentials: Credentials) -> None:
    """Have a socket connect with these keys. Raises zmq.ZMQError."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, credentials.server_keys[0])
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, credentials.public_key)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, credentials.secret_key)
