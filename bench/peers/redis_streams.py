"""Redis Streams with an append-only file: redis-py in pipelines of 1,000, and redis-benchmark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from typing import Any

from bench.peers.servers import Missing, Server, free_port, in_child


class Redis:
    """A running server with `appendfsync` everysec or always."""

    def __init__(self, directory: str, appendfsync: str) -> None:
        if shutil.which("redis-server") is None:
            raise Missing("redis-server is missing (Debian: apt-get install redis-server)")
        self.port = free_port()
        command = [
            "redis-server",
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            directory,
            "--save",
            "",
            "--appendonly",
            "yes",
        ]
        self.server = Server(
            [*command, "--appendfsync", appendfsync], self.port, f"{directory}/log.txt"
        )

    def produce(self, size: int, count: int) -> float:
        self._clear()
        return float(in_child(_produce, self.port, size, count))

    def benchmark(self, size: int, count: int) -> float:
        """redis-benchmark in C, pipelines of 200."""
        self._clear()
        command = [
            "redis-benchmark",
            "-p",
            str(self.port),
            "-q",
            "-P",
            "200",
            "-c",
            "4",
            "-n",
            str(count),
            "XADD",
            "s",
            "*",
            "k",
            "x" * size,
        ]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return float(re.findall(r"([\d.]+) requests per second", said)[-1])

    def latency(self, count: int) -> list[float]:
        self._clear()
        found: list[float] = in_child(_latency, self.port, count)
        return found

    def consume(self, size: int, count: int) -> float:
        self.produce(size, count)
        return float(in_child(_consume, self.port, count))

    def _clear(self) -> None:
        in_child(_clear, self.port)

    def stop(self) -> None:
        self.server.stop()


def _client(port: int) -> Any:
    import redis

    return redis.Redis(port=port)


def _clear(port: int) -> None:
    _client(port).flushall()


def _produce(port: int, size: int, count: int) -> float:
    client, payload = _client(port), os.urandom(size)
    client.ping()
    begun = time.perf_counter()
    for _ in range(count // 1000):
        pipeline = client.pipeline(transaction=False)
        for number in range(1000):
            pipeline.xadd("s", {b"k%d" % (number & 63): payload})
        pipeline.execute()
    return count / (time.perf_counter() - begun)


def _latency(port: int, count: int) -> list[float]:
    client, payload = _client(port), os.urandom(100)
    found = []
    for number in range(count + 200):
        begun = time.perf_counter()
        client.xadd("s", {b"v": payload})
        if number >= 200:
            found.append((time.perf_counter() - begun) * 1e6)
    return found


def _consume(port: int, count: int) -> float:
    client = _client(port)
    begun, seen, last = time.perf_counter(), 0, b"0"
    while seen < count:
        ((_, entries),) = client.xread({"s": last}, count=10_000)
        seen, last = seen + len(entries), entries[-1][0]
    return count / (time.perf_counter() - begun)
