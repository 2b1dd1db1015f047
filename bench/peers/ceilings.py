"""The ceilings underneath: the raw pyzmq pipe between two processes, and the disk written in
sequence.
"""

from __future__ import annotations

import os
import time
from typing import Any

import zmq

from bench.peers.servers import in_child

WINDOW = 32
SECONDS = 1.5


class Pipe:
    """A ROUTER in a process of its own that answers each message with 16 bytes."""

    def __init__(self, address: str) -> None:
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(address, theirs), daemon=True)
        self._process.start()
        self.address: str = ours.recv()

    def bandwidth(self, size: int) -> float:
        """MB/s of messages of `size` bytes, each acknowledged, 32 under way."""
        return float(in_child(_stream, self.address, size))

    def round_trips(self, count: int) -> list[float]:
        """Microseconds of each round trip of a 100-byte message."""
        found: list[float] = in_child(_ping, self.address, count)
        return found

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


def _serve(address: str, ready: Any) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    ready.send(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    answer = b"x" * 16
    while True:
        identity, *_ = socket.recv_multipart()
        socket.send_multipart([identity, answer])


def _stream(address: str, size: int) -> float:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    frames = [b"h" * 24, os.urandom(size)]
    copy = size < 64 << 10
    for _ in range(WINDOW):
        socket.send_multipart(frames, copy=copy)
    begun, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - begun) < SECONDS:
        socket.recv()
        socket.send_multipart(frames, copy=copy)
        count += 1
    return count * size / seconds / 1e6


def _ping(address: str, count: int) -> list[float]:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    found = []
    for number in range(count + 200):
        begun = time.perf_counter()
        socket.send_multipart([b"h" * 24, b"x" * 100])
        socket.recv()
        if number >= 200:
            found.append((time.perf_counter() - begun) * 1e6)
    return found


def disk_bandwidth(directory: str, size: int = 512 << 20) -> float:
    """MB/s of one sequential file in pieces of 1 MiB, one fdatasync at the end, as `dd
    conv=fdatasync` writes it.
    """
    piece, path = os.urandom(1 << 20), os.path.join(directory, "sequential")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        begun = time.perf_counter()
        for _ in range(size >> 20):
            os.write(fd, piece)
        os.fdatasync(fd)
        return size / (time.perf_counter() - begun) / 1e6
    finally:
        os.close(fd)
        os.unlink(path)


def sync_times(directory: str, size: int, count: int) -> list[float]:
    """Microseconds of each append of `size` bytes with its fdatasync."""
    piece, path, found = os.urandom(size), os.path.join(directory, "appended"), []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in range(count):
            begun = time.perf_counter()
            os.write(fd, piece)
            os.fdatasync(fd)
            found.append((time.perf_counter() - begun) * 1e6)
    finally:
        os.close(fd)
        os.unlink(path)
    return found
