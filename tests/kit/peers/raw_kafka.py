"""A Kafka client of a few lines: sends what a test wants to send, well formed or not."""

from __future__ import annotations

import socket
import ssl
import struct
from types import TracebackType
from typing import Any

from netfront.kafka.wire.decoding import Reader, decode, response_reader
from netfront.kafka.wire.definitions import is_flexible
from netfront.kafka.wire.encoding import request_writer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S, kill_and_wait_for_successor, wait_until

API_VERSIONS = 18


class RawKafka:
    """One connection."""

    def __init__(self, address: str, context: ssl.SSLContext | None = None) -> None:
        """`context`: the connection is encrypted."""
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=HANG_LIMIT_S)
        if context is not None:
            self._socket = context.wrap_socket(self._socket, server_hostname=host)
        self._correlation_id = 0

    def __enter__(self) -> RawKafka:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def set_timeout(self, seconds: float) -> None:
        """Wait so long for bytes."""
        self._socket.settimeout(seconds)

    def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._socket.sendall(data)

    def send(self, api: int, version: int, message: dict[str, Any]) -> int:
        """Send a request; return its correlation id."""
        body = bytearray()
        request_writer(api, version)(body, message)
        return self.send_body(api, version, bytes(body))

    def send_body(self, api: int, version: int, body: bytes) -> int:
        """Send a request with a body as it is."""
        self._correlation_id += 1
        head = struct.pack(">hhih", api, version, self._correlation_id, 4) + b"test"
        if is_flexible(api, version):
            head += b"\0"
        self.send_bytes(struct.pack(">i", len(head) + len(body)) + head + body)
        return self._correlation_id

    def receive_bytes(self) -> bytes | None:
        """Return a response from its correlation id on; None: the connection is closed."""
        try:
            size = self._take(4)
        except ConnectionError:
            return None
        return None if size is None else self._take(struct.unpack(">i", size)[0])

    def _take(self, size: int) -> bytes | None:
        found = b""
        while len(found) < size:
            piece = self._socket.recv(size - len(found))
            if not piece:
                return None
            found += piece
        return found

    def receive(self, api: int, version: int) -> tuple[int, dict[str, Any]]:
        """Return a response: its correlation id, and its body."""
        data = self.receive_bytes()
        assert data is not None, "the connection was closed"
        start = 5 if is_flexible(api, version) and api != API_VERSIONS else 4
        reader = Reader(data, start)
        found = decode(response_reader(api, version), reader)
        assert reader.position == len(data)
        return struct.unpack_from(">i", data, 0)[0], found

    def ask(self, api: int, version: int, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its response."""
        self.send(api, version, message)
        return self.receive(api, version)[1]


def kill_gateway(appliance: EmbeddedAppliance) -> None:
    """Kill the gateway; returns when its successor listens."""
    kill_and_wait_for_successor(appliance, "tr-kafka-0")

    def listens() -> bool:
        try:
            with RawKafka(appliance.kafka_addresses[0]):
                return True
        except ConnectionRefusedError:
            return False

    wait_until(listens, "the gateway listens")
