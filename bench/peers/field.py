"""Every server that can be had here, up for the whole run: ours on the disk and on a tmpfs, the raw
pipes, and the peers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from bench.peers.ceilings import Pipe
from bench.peers.jetstream import JetStream
from bench.peers.kafka import Kafka
from bench.peers.redis_streams import Redis
from bench.peers.servers import Missing
from bench.peers.tailrace_itself import Tailrace

T = TypeVar("T")
IGGY = (
    "Apache Iggy is left out: its client is on PyPI (apache-iggy), its server only a container "
    "image or source, which this does not fetch"
)


class Field:
    """Servers; ended with the stack. `missing`: a sentence for each that cannot be had."""

    def __init__(self, stack: ExitStack, directory: str) -> None:
        self._stack, self._directory = stack, directory
        self.missing: list[str] = [IGGY]
        self.ours = self._start("ours", Tailrace)
        self.ours_in_memory = self._start(
            "ours-tmpfs", Tailrace, stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        )
        self.pipe = Pipe("tcp://127.0.0.1:*")
        stack.callback(self.pipe.stop)
        self.local_pipe = Pipe(f"ipc://{directory}/pipe.sock")
        stack.callback(self.local_pipe.stop)
        self.kafka = self._try("Apache Kafka", lambda d: Kafka(d))
        self.redis = self._try("Redis Streams", lambda d: Redis(d, "everysec"))
        self.redis_synced = self._try("Redis Streams, synced", lambda d: Redis(d, "always"))
        self.jetstream = self._try("NATS JetStream", lambda d: JetStream(d))

    def _start(self, name: str, make: Callable[[str], T], directory: str | None = None) -> T:
        directory = directory or os.path.join(self._directory, name.replace(" ", "-"))
        os.makedirs(directory, exist_ok=True)
        server = make(directory)
        self._stack.callback(server.stop)  # type: ignore[attr-defined]
        return server

    def _try(self, name: str, make: Callable[[str], T]) -> T | None:
        try:
            return self._start(name, make)
        except (Missing, OSError) as error:
            self.missing.append(f"{name} is left out: {error}")
            return None
