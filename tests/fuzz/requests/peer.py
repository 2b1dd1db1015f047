"""A ZMTP 3.0 peer over a plain socket: it says exactly the bytes it is told to, and sees when the
appliance closes.

A DEALER of libzmq repairs what the fuzzer wants broken: it connects again by itself, and never
sends half a frame.
Owner: its user's loop; nothing here blocks but `__init__`, for at most CONNECT_TIMEOUT_S.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

CONNECT_TIMEOUT_S = 30.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
SOCKET_TYPE = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_PING = b"\x04PING"


def frame(data: bytes, flags: int = 0) -> bytes:
    """One ZMTP frame."""
    if len(data) > 255:
        return struct.pack(">BQ", flags | LONG, len(data)) + data
    return struct.pack("BB", flags, len(data)) + data


def message(frames: Sequence[bytes]) -> bytes:
    """A multipart message."""
    last = len(frames) - 1
    return b"".join(frame(data, MORE if index < last else 0) for index, data in enumerate(frames))


READY = frame(b"\x05READY" + SOCKET_TYPE, COMMAND)


def tcp_address(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


class Peer:
    """One connection. `is_closed`: by the appliance, or by `close`."""

    def __init__(self, address: str, *, greet: bool = True) -> None:
        self.socket = socket.create_connection(tcp_address(address), CONNECT_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.is_closed = False
        self._out = bytearray()
        self._in = bytearray()
        self._seen = 0
        """Bytes of `_in` that the greeting took; before it came: 0."""
        self._parts: list[bytes] = []
        self._held: bytearray | None = None
        """Bytes behind the greeting, until the appliance's has come: libzmq closes a connection on
        which it reads both at once.
        """
        if greet:
            self.send_bytes(GREETING)
            self._held = bytearray(READY)

    @property
    def unsent_bytes(self) -> int:
        return len(self._out) + len(self._held or b"")

    @property
    def wants_to_send(self) -> bool:
        return bool(self._out)

    def send(self, frames: Sequence[bytes]) -> None:
        self.send_bytes(message(frames))

    def send_bytes(self, data: bytes) -> None:
        """Send as much as the socket takes now; `flush` sends the rest."""
        if self._held is not None:
            self._held += data
            return
        self._out += data
        self.flush()

    def flush(self) -> None:
        try:
            while self._out and not self.is_closed:
                del self._out[: self.socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def receive(self) -> list[list[bytes]]:
        """Every whole message that has come."""
        try:
            while not self.is_closed:
                data = self.socket.recv(1 << 18)
                if not data:
                    self.close()
                self._in += data
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        return self._take_messages()

    def _take_messages(self) -> list[list[bytes]]:
        buffer, position = self._in, self._seen
        if not position:
            if len(buffer) < len(GREETING):
                return []
            position = len(GREETING)
            if self._held is not None:
                held, self._held = self._held, None
                self.send_bytes(bytes(held))
        messages = []
        while position + 2 <= len(buffer):
            flags, length, start = buffer[position], buffer[position + 1], position + 2
            if flags & LONG:
                if position + 9 > len(buffer):
                    break
                length, start = struct.unpack_from(">Q", buffer, position + 1)[0], position + 9
            if start + length > len(buffer):
                break
            data = bytes(buffer[start : start + length])
            position = start + length
            if flags & COMMAND:
                if data.startswith(_PING):
                    self.send_bytes(frame(b"\x04PONG" + data[7:], COMMAND))
                continue
            self._parts.append(data)
            if not flags & MORE:
                messages.append(self._parts)
                self._parts = []
        if position > len(GREETING):
            del buffer[len(GREETING) : position]
            position = len(GREETING)
        self._seen = position
        return messages

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.socket.close()


def half_spoken(noise: bytes, choice: int) -> tuple[bool, bytes]:
    """First bytes of a stranger, or of a broken client, on the port: (whether ZMTP's greeting comes
    first, what follows). 11 kinds.
    """
    bare = (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise,
        noise,
        GREETING[: 1 + noise[0] % 63],
    )
    greeted = (
        noise,
        struct.pack(">BQ", LONG, 1 << 63) + noise,
        struct.pack(">BQ", LONG, 60 << 20) + noise,
        frame(b"part", MORE) * 500,
        frame(b"", MORE) * 5_000,
        frame(noise[:9], COMMAND) + frame(b"\x05ERROR\x03bad", COMMAND),
        struct.pack("BB", 0xFF, 5) + noise,
    )
    kinds = [(False, data) for data in bare] + [(True, data) for data in greeted]
    return kinds[choice % len(kinds)]
