"""A front in memory with one partition of records, which are fetched; and what a group has
committed of it.

Owner: one test.
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from typing import Any

import orjson

from tailrace import Consumer, TopicPartition
from tailrace.client.connections.runtime import Runtime
from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tailrace.protocol import fetch_messages
from tailrace.protocol.fetch_messages import FetchedEntry
from tailrace.protocol.frame import API_VERSIONS, Api, decode_request_header, encode_response
from tests.conformance.interrupts import outside
from tests.kit.batches import TOPIC_ID, make_batch, stamped
from tests.kit.peers.scripted_front import MS

KEY = TopicPartition("t", 0)
BATCH_ROWS = 3
GENERATION = 7


def _unknown(name: str) -> dict[str, Any]:
    return {"name": name, "code": int(ErrorCode.UNKNOWN_TOPIC), "partitions": []}


class ReadingFront:
    """See the module's docstring."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.batches = [
            bytes(stamped(make_batch(BATCH_ROWS), base)) for base in range(0, count, BATCH_ROWS)
        ]
        self.committed: list[int] = []
        """Each offset that was committed, in the order that came."""
        self.newest: Socket | None = None

    def connect(self) -> Socket:
        with outside():
            return Socket(self)

    def answer(self, api: Api, body: list[bytes]) -> tuple[ErrorCode, list[Readable]]:
        match api:
            case Api.HANDSHAKE:
                versions = {str(int(api)): high for api, (_, high) in API_VERSIONS.items()}
                return ErrorCode.OK, [orjson.dumps({"versions": versions, "cluster_id": "c"})]
            case Api.METADATA:
                names = orjson.loads(body[0])["topics"] or ["t"]
                topics = [self._described() if n == "t" else _unknown(n) for n in names]
                return ErrorCode.OK, [orjson.dumps({"topics": topics})]
            case Api.LIST_OFFSETS:
                item = {"topic": "t", "partition": 0, "code": 0, "beginning": 0, "end": self.count}
                asked = orjson.loads(body[0])["partitions"][0]["at"]
                return ErrorCode.OK, [
                    orjson.dumps(
                        {"offsets": [{**item, "offset": self.count if asked == "latest" else 0}]}
                    )
                ]
            case Api.FETCH_OFFSETS:
                offset = self.committed[-1] if self.committed else -1
                return ErrorCode.OK, [
                    orjson.dumps({"offsets": [["t", 0, offset, 0, "", 1]], "next": None})
                ]
            case Api.COMMIT_OFFSETS:
                self.committed += [item[2] for item in orjson.loads(body[0])["offsets"]]
                return ErrorCode.OK, [orjson.dumps({"refused": []})]
            case Api.FETCH:
                return ErrorCode.OK, self._fetched(fetch_messages.decode_fetch(body[0]))
        return ErrorCode.OK, []

    def _fetched(self, asked: fetch_messages.FetchRequest) -> list[Readable]:
        """Two batches at most: a poll goes through several answers."""
        (entry,) = asked.entries
        first = entry.offset // BATCH_ROWS
        data = b"".join(self.batches[first : first + 2])
        head = fetch_messages.encode_fetched(
            [FetchedEntry(TOPIC_ID, 0, 0, 0, len(data), self.count, 0, -1)]
        )
        return [head, data] if data else [head]

    @staticmethod
    def _described() -> dict[str, Any]:
        return {
            "name": "t", "topic_id": TOPIC_ID.hex(), "version": 1, "typed": False, "schema_id": 1,
            "code": 0,
            "schema": b64encode(to_message(DEFAULT_SCHEMA)).decode(),
            "partitions": [{"partition": 0}], "settings": {"max.message.bytes": 8 << 20},
        }  # fmt: skip


class Socket:
    """One connection to a ReadingFront."""

    is_lost = False

    def __init__(self, front: ReadingFront) -> None:
        self._front = front
        self._answers: deque[list[bytes]] = deque()

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        del copy
        with outside():
            header = decode_request_header(bytes(frames[0]))
            code, body = self._front.answer(Api(header.api), [bytes(frame) for frame in frames[1:]])
            answer = encode_response(
                header.api, header.version, header.correlation_id, code, 1 << 40, GENERATION, body
            )
            self._answers.append([bytes(frame) for frame in answer])
        return True

    def try_receive(self) -> list[bytes] | None:
        with outside():
            return self._answers.popleft() if self._answers else None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._answers.clear()


class DrivenConsumer:
    """A consumer of a group on a clock of the test's own, with the partition assigned: where it
    sleeps, time passes.
    """

    def __init__(self, count: int, **settings: Any) -> None:
        self.front = ReadingFront(count)
        self.now_ns = 1_000_000_000
        runtime = Runtime(
            lambda: self.now_ns,
            lambda _: self.front.connect(),
            self._sleep,
            lambda: 0.5,
            has_threads=False,
        )
        self.consumer = Consumer(
            bootstrap="tcp://127.0.0.1:1",
            runtime=runtime,
            group_id="g",
            auto_offset_reset="earliest",
            auto_commit_interval_ms=0,
            **settings,
        )
        self.consumer.assign([KEY])

    def _sleep(self, _fds: Sequence[int], timeout_ns: int) -> None:
        self.now_ns += max(MS // 10, timeout_ns)
