"""A front over segment files that a test writes, and clients of it on a clock of the test's own,
all in one thread.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from netfront.fetch.log.file_reader import DiskFileReader
from netfront.fetch.log.log_reader import LogReader
from tailrace import Consumer, TopicPartition
from tailrace.client.connections.runtime import Runtime
from tailrace.format.crc32c import Readable
from tailrace.protocol import fetch_messages
from tailrace.protocol.frame import Api
from tests.kit.batches import TOPIC_ID
from tests.kit.log_files.transaction_logs import TransactionLog
from tests.kit.stepped.fronts import MS, FakeClient, FakeFront

KEY = TopicPartition("t", 0)


class CountingFiles(DiskFileReader):
    """Files that count the bytes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0
        self.is_cold = False

    def read_into(self, fd: int, target: memoryview, position: int, *, blocking: bool) -> int:
        if self.is_cold and not blocking:
            raise BlockingIOError
        count = super().read_into(fd, target, position, blocking=blocking)
        self.read_bytes += count
        return count


class FileFront(FakeFront):
    """A front that serves partitions of `TransactionLog`."""

    def __init__(self, directory: Path, partitions: int = 1) -> None:
        self.logs = [
            TransactionLog(directory, topic_id=TOPIC_ID, partition=p) for p in range(partitions)
        ]
        self.files = CountingFiles()
        reader = LogReader(self.files, [os.fspath(directory)], cast(Any, [self]), 16)
        super().__init__(log=reader)
        for slot, log in enumerate(self.logs):
            settings = {"max.message.bytes": 8 << 20, "delay.enabled": False}
            self.routing.apply(
                replace(log.route(slot), partition_count=partitions, settings=settings)
            )
        self.pieces_read = 0
        """Reads of the reader pool."""

    def read(self, slot: int) -> Any:
        """As `PartitionTable.read`."""
        return self.logs[slot].state

    def settled(self, slot: int = 0) -> None:
        """The front hears of a new state."""
        self.front._fetches.on_settled({slot})

    def runtime(self) -> Runtime:
        """For a client in the same thread: where it sleeps, the front works and time passes."""
        return Runtime(
            lambda: self.now_ns, lambda _: Socket(self), self._sleep, lambda: 0.5, has_threads=False
        )

    def _sleep(self, _fds: Sequence[int], timeout_ns: int) -> None:
        self.step(max(1, min(timeout_ns, 100 * MS) // MS))

    def consumer(self, **settings: Any) -> Consumer:
        """A consumer with all partitions assigned."""
        made = Consumer(
            bootstrap="tcp://127.0.0.1:1",
            runtime=self.runtime(),
            **{"auto_offset_reset": "earliest", **settings},
        )
        made.assign([TopicPartition("t", log.partition) for log in self.logs])
        return made

    def fetched(
        self,
        client: FakeClient,
        offset: int = 0,
        *,
        flags: int = 0,
        version: int = fetch_messages.FETCH_VERSION,
        max_bytes: int = 1 << 20,
        max_wait_ms: int = 0,
        min_bytes: int = 1,
    ) -> tuple[fetch_messages.FetchedEntry, memoryview]:
        """The answer to one FETCH of the first partition."""
        entry = fetch_messages.FetchEntry(TOPIC_ID, 0, -1, offset, max_bytes, flags)
        request = fetch_messages.FetchRequest(max_wait_ms, min_bytes, max_bytes, 0, [entry])
        number = client.send(Api.FETCH, fetch_messages.encode_fetch(request), version=version)
        self.settle()
        heard = client.heard()
        while number not in heard:
            self.pieces_read += len(self.pool.submitted)
            self.pool.done, self.pool.submitted = self.pool.submitted, []
            self.step(100)
            heard = client.heard()
        return fetch_messages.decode_fetched(heard[number][1], version)[0]


class Socket:
    """A client's connection to a FakeFront."""

    is_lost = False
    _count = 0

    def __init__(self, world: FakeFront) -> None:
        Socket._count += 1
        self._world = world
        self._identity = b"socket-%d" % Socket._count

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        del copy
        self._world.transport.inbox.append([self._identity, *(bytes(frame) for frame in frames)])
        self._world.settle()
        return True

    def try_receive(self) -> list[bytes] | None:
        answers = self._world.transport.answers.get(self._identity, deque())
        return answers.popleft() if answers else None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass
