"""Delayed delivery as people do it without us: a Redis sorted set that is polled, and RabbitMQ's
dead letters.

Each returns (milliseconds behind its due time at which a consumer has each record, resident memory
of the server in MB).
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from bench.peers.redis_streams import Redis
from bench.peers.servers import Missing

POLL_S = 0.01


def redis_lateness(rate: int, seconds: float) -> tuple[list[float], float]:
    """ZADD with the due time as score, appendfsync everysec; ZRANGEBYSCORE and ZREM every 10 ms.
    Raises Missing.
    """
    try:
        import redis
    except ImportError:
        raise Missing(
            "the Python package redis is missing (pip install -r bench/peers/requirements.txt)"
        ) from None
    with tempfile.TemporaryDirectory(prefix="tailrace-redis-") as directory:
        server = Redis(directory, "everysec")
        client: Any = redis.Redis(port=server.port)
        count = int(rate * seconds)
        begin_us = time.time_ns() // 1000 + 4_000_000
        for start in range(0, count, 1000):
            batch = {
                (begin_us + n * 1_000_000 // rate).to_bytes(8, "big"): begin_us
                + n * 1_000_000 // rate
                for n in range(start, min(count, start + 1000))
            }
            client.zadd("later", batch)
        times: list[float] = []
        while len(times) < count:
            found = client.zrangebyscore("later", 0, time.time_ns() // 1000, 0, 1000)
            if not found:
                time.sleep(POLL_S)
                continue
            client.zrem("later", *found)
            now_us = time.time_ns() // 1000
            times += [(now_us - int.from_bytes(member, "big")) / 1000 for member in found]
        memory = psutil.Process(server.server.pid).memory_info().rss / 1e6
        server.stop()
    return times, memory


def rabbitmq_lateness(rate: int, seconds: float) -> tuple[list[float], float]:
    """Messages with one TTL in a queue without consumers, whose dead letters are consumed;
    published `rate` a second. Raises Missing.
    """
    if shutil.which("rabbitmq-server") is None:
        raise Missing("rabbitmq-server is missing (Debian: apt-get install rabbitmq-server)")
    try:
        import pika
    except ImportError:
        raise Missing(
            "the Python package pika is missing (pip install -r bench/peers/requirements.txt)"
        ) from None
    from bench.peers.servers import Server, free_port

    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tailrace-rabbit-") as directory:
        os.chmod(directory, 0o777)  # it changes to a user of its own
        settings = {
            "RABBITMQ_NODE_PORT": str(port), "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_MNESIA_BASE": directory,
            "RABBITMQ_LOG_BASE": directory, "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_USE_LONGNAME": "false",
        }  # fmt: skip
        server = Server(["rabbitmq-server"], port, f"{directory}/log.txt", settings)
        try:
            parameters = pika.ConnectionParameters("127.0.0.1", port)
            times = _expired(
                lambda: pika.BlockingConnection(parameters).channel(), rate, int(rate * seconds)
            )
            processes = [process for process in psutil.process_iter() if "beam" in process.name()]
            memory = sum(process.memory_info().rss for process in processes) / 1e6
        finally:
            os.killpg(
                server.pid, signal.SIGKILL
            )  # the shell script that was started does not take its children along
            server.kill()
    return times, memory


def _expired(new_channel: Callable[[], Any], rate: int, count: int) -> list[float]:
    """Publish messages with one TTL, and return the lateness of their dead letters in ms."""
    ttl_ms = 2_000
    times: list[float] = []

    def consume() -> None:
        channel = new_channel()
        channel.queue_declare("due")
        for _, _, body in channel.consume("due", auto_ack=True):
            times.append((time.time_ns() // 1000 - int.from_bytes(body[:8], "big")) / 1000)
            if len(times) >= count:
                return

    consumer = threading.Thread(target=consume)
    consumer.start()
    channel = new_channel()
    channel.queue_declare("due")
    channel.queue_declare(
        "later",
        arguments={
            "x-message-ttl": ttl_ms,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "due",
        },
    )
    begun = time.perf_counter()
    for number in range(count):
        while time.perf_counter() - begun < number / rate:
            time.sleep(0.001)
        channel.basic_publish(
            "", "later", (time.time_ns() // 1000 + ttl_ms * 1000).to_bytes(8, "big")
        )
    consumer.join()
    return times
