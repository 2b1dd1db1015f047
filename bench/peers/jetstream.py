"""NATS JetStream with file storage, through nats-py: up to 4,000 publications under way."""

from __future__ import annotations

import asyncio
import os
import shutil
import time

from bench.peers.servers import Missing, Server, free_port, in_child


class JetStream:
    """A running server."""

    def __init__(self, directory: str) -> None:
        if shutil.which("nats-server") is None:
            raise Missing("nats-server is missing (Debian: apt-get install nats-server)")
        self.port = free_port()
        self.server = Server(
            ["nats-server", "-js", "-sd", directory, "-p", str(self.port), "-a", "127.0.0.1"],
            self.port,
            f"{directory}/log.txt",
        )

    def produce(self, size: int, count: int) -> float:
        return float(in_child(_run_produce, self.port, size, count))

    def latency(self, count: int) -> list[float]:
        found: list[float] = in_child(_run_latency, self.port, count)
        return found

    def stop(self) -> None:
        self.server.stop()


def _run_produce(port: int, size: int, count: int) -> float:
    return asyncio.run(_produce(port, size, count))


def _run_latency(port: int, count: int) -> list[float]:
    return asyncio.run(_latency(port, count))


async def _stream(port: int) -> tuple[object, object]:
    import nats

    connection = await nats.connect(f"nats://127.0.0.1:{port}")
    stream = connection.jetstream(timeout=30)
    try:
        await stream.delete_stream("s")
    except nats.js.errors.NotFoundError:
        pass
    await stream.add_stream(name="s", subjects=["s"], storage="file")
    return connection, stream


async def _produce(port: int, size: int, count: int) -> float:
    connection, stream = await _stream(port)
    payload = os.urandom(size)
    begun = time.perf_counter()
    for _ in range(count):
        await stream.publish_async("s", payload, wait_stall=30)  # type: ignore[attr-defined]
    await stream.publish_async_completed()  # type: ignore[attr-defined]
    rate = count / (time.perf_counter() - begun)
    await connection.close()  # type: ignore[attr-defined]
    return rate


async def _latency(port: int, count: int) -> list[float]:
    connection, stream = await _stream(port)
    payload = os.urandom(100)
    found = []
    for number in range(count + 200):
        begun = time.perf_counter()
        await stream.publish("s", payload)  # type: ignore[attr-defined]
        if number >= 200:
            found.append((time.perf_counter() - begun) * 1e6)
    await connection.close()  # type: ignore[attr-defined]
    return found
