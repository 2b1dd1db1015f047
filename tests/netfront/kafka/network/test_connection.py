"""A connection's bytes become requests, however they arrive, and no size takes memory."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from netfront.kafka.network.connection import (
    FRAMES_MAX,
    PRODUCE_MAX_BYTES,
    REQUEST_MAX_BYTES,
    Connection,
    Exchange,
    FrameError,
)


@pytest.fixture
def connection() -> Iterator[tuple[Connection, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        sock, _ = server.accept()
        sock.setblocking(False)
        made = Connection(sock, "test", 1)
        yield made, theirs
        made.close()
        theirs.close()


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


REQUESTS = [bytes([n]) * (8 + n) for n in range(5)]


@pytest.mark.parametrize("piece", [1, 3, 7, 1_000])
def test_requests_are_cut_from_pieces_of_any_size(
    connection: tuple[Connection, socket.socket], piece: int
) -> None:
    made, _ = connection
    stream = b"".join(map(frame, REQUESTS))
    for at in range(0, len(stream), piece):
        made.feed(memoryview(stream[at : at + piece]), 5)
    assert list(made.frames) == REQUESTS
    assert made.incomplete_since_ns == 0
    assert made.unserved_bytes == sum(map(len, REQUESTS))
    made.feed(memoryview(b"\0"), 7)
    assert made.incomplete_since_ns == 7


@pytest.mark.parametrize("size", [-1, 0, 7, PRODUCE_MAX_BYTES + 1, 0x7FFFFFFF])
def test_a_size_out_of_bounds_is_refused_with_its_four_bytes(
    connection: tuple[Connection, socket.socket], size: int
) -> None:
    with pytest.raises(FrameError, match="are allowed"):
        connection[0].feed(memoryview(struct.pack(">i", size)), 1)


def test_only_produce_may_be_large(connection: tuple[Connection, socket.socket]) -> None:
    made, _ = connection
    made.feed(memoryview(struct.pack(">ihh", REQUEST_MAX_BYTES + 1, 0, 9)), 1)
    assert not made.frames
    made.feed(memoryview(bytes(REQUEST_MAX_BYTES - 3)), 1)
    assert len(made.frames) == 1
    with pytest.raises(FrameError, match="of API 3"):
        made.feed(memoryview(struct.pack(">ihh", REQUEST_MAX_BYTES + 1, 3, 9)), 1)


def test_a_connection_with_enough_requests_is_not_read(
    connection: tuple[Connection, socket.socket],
) -> None:
    made, theirs = connection
    theirs.sendall(frame(bytes(8)) * FRAMES_MAX)
    scratch = memoryview(bytearray(12 * FRAMES_MAX))
    while not made.is_full:
        made.read(scratch, 1)
    theirs.sendall(frame(bytes(8)))
    assert made.read(scratch, 1) == 0


def test_responses_leave_in_the_order_of_requests(
    connection: tuple[Connection, socket.socket],
) -> None:
    made, theirs = connection
    exchanges = [Exchange(0, 9, n, 1) for n in range(3)]
    made.exchanges.extend(exchanges)
    exchanges[2].response = b"third"
    exchanges[1].response = b""  # acks=0: no response
    assert made.queue_responses() == 0
    exchanges[0].response = bytearray(b"first")
    assert made.queue_responses() == 3
    made.send()
    assert theirs.recv(100) == b"firstthird"
    assert made.unsent_bytes == 0
