"""A peer that speaks ZMTP 3.0 (NULL) by hand over a socket: it may send what no ZeroMQ library
would.

ZMTP 3.0: a greeting of 64 bytes each way, a READY command each way, then frames: flags (1 more, 2
long, 4 command), a length of 1 or 8 bytes, the body. Nothing here waits longer than `HANG_LIMIT_S`;
sending answers False when the other end has closed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import orjson

from tailrace.protocol.frame import API_VERSIONS, Api, encode_request
from tests.kit.processes import HANG_LIMIT_S

MORE, LONG, COMMAND = 1, 2, 4
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
assert len(GREETING) == 64


def frame(body: bytes, *, more: bool = False, command: bool = False) -> bytes:
    """One frame as it goes over the wire."""
    flags = (MORE if more else 0) | (COMMAND if command else 0)
    return (
        struct.pack("<BB", flags, len(body)) + body
        if len(body) < 256
        else struct.pack(">BQ", flags | LONG, len(body)) + body
    )


def message(parts: Sequence[bytes]) -> bytes:
    """A whole message: every frame but the last says that more follows."""
    return b"".join(frame(bytes(part), more=i + 1 < len(parts)) for i, part in enumerate(parts))


def _property(name: bytes, value: bytes) -> bytes:
    return struct.pack(">B", len(name)) + name + struct.pack(">I", len(value)) + value


def ready(identity: bytes = b"") -> bytes:
    """The READY command of a DEALER."""
    return frame(
        b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", identity),
        command=True,
    )


class RawPeer:
    """One connection to `address` (tcp://HOST:PORT or ipc://PATH)."""

    def __init__(self, address: str, *, receive_buffer_bytes: int = 0) -> None:
        """`receive_buffer_bytes`: a small one makes a reader that stops be felt soon."""
        scheme, _, rest = address.partition("://")
        self.socket = socket.socket(
            socket.AF_UNIX if scheme == "ipc" else socket.AF_INET, socket.SOCK_STREAM
        )
        self.socket.settimeout(HANG_LIMIT_S)
        if receive_buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self._received = bytearray()
        try:
            self._connect(scheme, rest)
        except BaseException:
            self.close()
            raise

    def _connect(self, scheme: str, rest: str) -> None:
        if scheme == "ipc":
            self.socket.connect(rest)
        else:
            host, _, port = rest.rpartition(":")
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # accepted and closed at once: `send` tells
                self.socket.connect((host, int(port)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes | bytearray | memoryview) -> bool:
        """All of `data`, as it is; False when the other end has closed. Raises TimeoutError when it
        takes nothing for long.
        """
        left = memoryview(data)
        ready = select.poll()
        ready.register(self.socket, select.POLLOUT | select.POLLRDHUP)
        while left:
            events = ready.poll(HANG_LIMIT_S * 1000)
            if not events:
                raise TimeoutError(f"the other end takes nothing for {HANG_LIMIT_S} s")
            if events[0][1] & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                return False
            try:
                left = left[self.socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                return False
        return True

    def shake_zmtp(self, identity: bytes = b"") -> None:
        """Greeting and READY, both ways."""
        self.send(GREETING)
        self._take(64)
        self.send(ready(identity))
        self.receive_frame()

    def shake(self, client_id: str = "raw") -> None:
        """ZMTP's handshake, and the appliance's."""
        self.shake_zmtp()
        versions = {str(int(api)): list(span) for api, span in API_VERSIONS.items()}
        self.request(
            Api.HANDSHAKE, [orjson.dumps({"versions": versions, "client_id": client_id})], 1
        )
        self.receive_message()

    def request(
        self, api: int, body: Sequence[bytes], correlation_id: int, version: int | None = None
    ) -> bool:
        """A request of the appliance's protocol."""
        known = version if version is not None else API_VERSIONS[Api(api)][1]
        return self.send(
            message([bytes(part) for part in encode_request(api, known, correlation_id, body)])
        )

    def receive_frame(self) -> tuple[int, bytes]:
        """(flags, body). Raises ConnectionError when the other end has closed."""
        flags = self._take(1)[0]
        length = struct.unpack(">Q", self._take(8))[0] if flags & LONG else self._take(1)[0]
        return flags, self._take(length)

    def receive_message(self) -> list[bytes]:
        """The next whole message; commands between are skipped."""
        parts = []
        while True:
            flags, body = self.receive_frame()
            if flags & COMMAND:
                continue
            parts.append(body)
            if not flags & MORE:
                return parts

    def is_closed(self) -> bool:
        """Wait until the other end closes (True) or the timeout passes (False); what it still sends
        is thrown away.
        """
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True
        return True

    def _take(self, count: int) -> bytes:
        while len(self._received) < count:
            piece = self.socket.recv(1 << 16)
            if not piece:
                raise ConnectionError("the other end has closed")
            self._received += piece
        taken = bytes(memoryview(self._received)[:count])
        del self._received[:count]
        return taken


@contextlib.contextmanager
def crowd(addresses: Iterable[str]) -> Iterator[list[RawPeer]]:
    """A connection to each address, all of them closed at the end, also when one cannot be made."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RawPeer(address)) for address in addresses]
