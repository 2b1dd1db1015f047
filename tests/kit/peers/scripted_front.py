"""A front that does what a test says, in memory, and a producer of one thread on a clock of the
test's own.

Owner: one test. Invariants: nothing is answered but the handshake, METADATA and INIT_PRODUCER_ID
    before the test says so.
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from tailrace.client.connections.runtime import Runtime
from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.batch_header import BatchHeader, checksum_seed, verify_batch
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tailrace.producer.producer import Producer
from tailrace.protocol import json_messages as requests
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import Api, decode_request_header, encode_response

TOPIC_ID = bytes(range(16))
GENERATION = 7
MS = 1_000_000


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def sleep(self, _fds: Sequence[int], timeout_ns: int) -> None:
        self.now_ns += max(0, timeout_ns)


class NobodyThere:
    """A socket without another end."""

    is_lost = False

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        return True

    def try_receive(self) -> list[bytes] | None:
        return None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class Arrived(NamedTuple):
    """A batch of a PRODUCE request."""

    partition: int
    header: BatchHeader
    byte_count: int


class Asked:
    """A PRODUCE request that came, and its batches, each proven."""

    def __init__(self, version: int, correlation_id: int, body: list[bytes]) -> None:
        self.version = version
        self.correlation_id = correlation_id
        self.frame_count = len(body) - 1
        if version < 2:
            self.acks = produce_messages.decode_produce(body[0]).acks
            entries = [(produce_messages.decode_produce(body[0]).partition, len(body[1]))]
        else:
            head = produce_messages.decode_produce_batches(body[0])
            assert len(produce_messages.cut_batches(head.entries, body[1:])) == len(head.entries), (
                "a batch lies across two frames"
            )
            self.acks = head.acks
            entries = [(entry[1], entry[3]) for entry in head.entries]
        data = memoryview(b"".join(body[1:]))
        self.batches: list[Arrived] = []
        for partition, length in entries:
            self.batches.append(
                Arrived(
                    partition,
                    verify_batch(data[:length], checksum_seed(TOPIC_ID, partition)),
                    length,
                )
            )
            data = data[length:]
        assert not len(data)

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """(partition, first sequence, how many records) of each batch."""
        return [
            (batch.partition, batch.header.base_sequence, batch.header.record_count)
            for batch in self.batches
        ]


class ScriptedFront:
    """A front that a producer's sockets are connected to."""

    def __init__(
        self, produce_version: int = 2, partitions: int = 3, credit: int = 1 << 40
    ) -> None:
        self.produce_version = produce_version
        self.partitions = partitions
        self.credit = credit
        self.is_silent = False
        """It answers nothing, not even what it otherwise does by itself."""
        self.epoch = -1
        self.asked: list[Asked] = []
        """PRODUCE requests that are not answered yet."""
        self.asked_count = 0
        self.credit_asked_count = 0
        self._next_offsets: dict[int, int] = {}
        self._answers: deque[list[bytes]] = deque()
        self._socket: _Socket | None = None

    def connect(self) -> _Socket:
        self._answers.clear()
        self._socket = _Socket(self)
        return self._socket

    def take(self, socket: _Socket, frames: list[bytes]) -> None:
        if socket is not self._socket or self.is_silent:
            return
        header, body = decode_request_header(frames[0]), frames[1:]
        match header.api:
            case Api.HANDSHAKE:
                versions = {str(int(api)): 1 for api in Api} | {
                    str(int(Api.PRODUCE)): self.produce_version
                }
                self._json(
                    header.api, header.correlation_id, {"versions": versions, "cluster_id": "c"}
                )
            case Api.METADATA:
                self._json(header.api, header.correlation_id, {"topics": [self._described()]})
            case Api.INIT_PRODUCER_ID:
                self.epoch += 1
                self._json(
                    header.api,
                    header.correlation_id,
                    {"producer_id": 9, "producer_epoch": self.epoch},
                )
            case Api.CREDIT:
                self.credit_asked_count += 1
            case Api.PRODUCE:
                assert header.version == self.produce_version
                asked = Asked(header.version, header.correlation_id, body)
                self.asked_count += 1
                if asked.acks:
                    self.asked.append(asked)

    def _described(self) -> dict[str, Any]:
        return {
            "name": "t", "topic_id": TOPIC_ID.hex(), "version": 1, "typed": False, "schema_id": 1,
            "schema": b64encode(to_message(DEFAULT_SCHEMA)).decode(),
            "code": 0, "partitions": [{"partition": n} for n in range(self.partitions)],
            "settings": {"max.message.bytes": 8 << 20, "compression.type": "producer",
            "message.timestamp.type": "CreateTime", "delay.enabled": False,
                         "delay.levels": "", "durability": "disk", "partitioner": "producer"},
        }  # fmt: skip

    def _json(self, api: int, correlation_id: int, value: dict[str, Any]) -> None:
        self._reply(api, 1, correlation_id, ErrorCode.OK, orjson.dumps(value))

    def _reply(self, api: int, version: int, correlation_id: int, code: int, body: bytes) -> None:
        self._answers.append(
            [
                bytes(frame)
                for frame in encode_response(
                    api, version, correlation_id, code, self.credit, GENERATION, [body]
                )
            ]
        )

    def answer(self, asked: Asked | None = None, codes: Sequence[ErrorCode] = ()) -> Asked:
        """Answer a request, the oldest one unless told: OK, or with a code for each batch. What is
        OK is given the next offsets.
        """
        asked = self.asked[0] if asked is None else asked
        self.asked.remove(asked)
        codes = codes or [ErrorCode.OK] * len(asked.batches)
        results = []
        for (partition, header, _), code in zip(asked.batches, codes, strict=True):
            offset = -1
            if code is ErrorCode.OK:
                offset = self._next_offsets.get(partition, 0)
                self._next_offsets[partition] = offset + header.record_count
            results.append(produce_messages.ProducedEntry(code, 0, 0, offset, 5))
        if asked.version >= 2:
            self._reply(
                Api.PRODUCE,
                2,
                asked.correlation_id,
                ErrorCode.OK,
                produce_messages.encode_produced_batches(results),
            )
        elif results[0].error:
            self._reply(
                Api.PRODUCE, 1, asked.correlation_id, results[0].error, requests.encode_error("no")
            )
        else:
            self._reply(
                Api.PRODUCE,
                1,
                asked.correlation_id,
                0,
                produce_messages.encode_produced(
                    produce_messages.ProduceResponse(results[0].base_offset, 5, 0, 0)
                ),
            )
        return asked

    def refuse(self, code: ErrorCode) -> Asked:
        """Refuse the oldest request as a whole."""
        asked = self.asked.pop(0)
        self._reply(
            Api.PRODUCE, asked.version, asked.correlation_id, code, requests.encode_error("refused")
        )
        return asked

    def answer_oddly(self, body: bytes) -> None:
        asked = self.asked.pop(0)
        self._reply(Api.PRODUCE, asked.version, asked.correlation_id, ErrorCode.OK, body)

    def grant(self, more: int) -> None:
        """More credit, told at once."""
        self.credit += more
        self._answers.append(
            [
                bytes(frame)
                for frame in encode_response(Api.CREDIT, 1, 0, 0, self.credit, GENERATION)
            ]
        )

    def restart(self) -> None:
        """Its connections are lost: it knows no session."""
        self.asked.clear()
        self._answers.append(
            [
                bytes(frame)
                for frame in encode_response(
                    Api.PING, 1, 1, ErrorCode.SESSION_UNKNOWN, 0, GENERATION + 1
                )
            ]
        )


class _Socket:
    is_lost = False

    def __init__(self, front: ScriptedFront) -> None:
        self._front = front
        self._is_closed = False

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        del copy
        assert not self._is_closed
        self._front.take(self, [bytes(frame) for frame in frames])
        return True

    def try_receive(self) -> list[bytes] | None:
        assert not self._is_closed
        front = self._front
        return front._answers.popleft() if front._answers and front._socket is self else None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._is_closed = True


class Driven:
    """A producer that the test drives, on the test's clock."""

    def __init__(self, front: ScriptedFront, **settings: Any) -> None:
        self.front = front
        self.now_ns = 1_000_000_000
        runtime = Runtime(
            lambda: self.now_ns,
            lambda _: front.connect(),
            self._sleep,
            lambda: 0.5,
            has_threads=False,
        )
        self.producer = Producer("tcp://127.0.0.1:1", runtime=runtime, **settings)
        for _ in range(3):
            self.turn()  # the handshake, and its producer id

    def _sleep(self, _fds: Sequence[int], timeout_ns: int) -> None:
        self.now_ns += max(0, timeout_ns)

    def turn(self, milliseconds: float = 0) -> None:
        """Time passes; what can be done then is done."""
        self.now_ns += int(milliseconds * MS)
        sender_thread = self.producer._sender_thread
        with sender_thread.lock:
            sender_thread.run_once()
        sender_thread.make_callbacks()

    def close(self) -> None:
        self.producer._sender_thread.stop()
