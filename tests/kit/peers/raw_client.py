"""A client that keeps to nothing: frames of a test's own on a socket of its own, past the SDK."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import orjson
import zmq

from tailrace.client.connections.credentials import Credentials
from tailrace.client.connections.handshake_probe import set_credentials
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.format.crc32c import Readable
from tailrace.protocol import fetch_messages, produce_messages
from tailrace.protocol.frame import (
    API_VERSIONS,
    PUSH_CORRELATION_ID,
    Api,
    ResponseHeader,
    decode_response_header,
    encode_request,
)
from tests.kit.processes import HANG_LIMIT_S

ANSWER_TIMEOUT_MS = int(HANG_LIMIT_S * 1_000)


class RawClient:
    """One DEALER. Requests go out with any body; answers come back by correlation id."""

    def __init__(
        self,
        address: str,
        *,
        handshake: bool = True,
        versions: dict[int, tuple[int, int]] = API_VERSIONS,
        credentials: Credentials | None = None,
        identity: bytes = b"",
        timeout_ms: int = ANSWER_TIMEOUT_MS,
    ) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
        self._socket.setsockopt(zmq.SNDTIMEO, ANSWER_TIMEOUT_MS)
        if identity:
            self._socket.setsockopt(zmq.ROUTING_ID, identity)
        if credentials is not None:
            set_credentials(self._socket, credentials)
        self._socket.connect(address)
        self._next = 1
        self._offered = versions
        self.versions: dict[int, int] = {}
        """That the handshake chose."""
        self._answers: dict[int, tuple[ResponseHeader, list[bytes]]] = {}
        if handshake:
            try:
                self._shake()
            except BaseException:
                self.close()
                raise

    def _shake(self) -> None:
        offered = {str(int(api)): list(versions) for api, versions in self._offered.items()}
        code, answer = self.ask(Api.HANDSHAKE, {"versions": offered, "client_id": "raw"})
        assert code is ErrorCode.OK
        self.versions = {int(api): version for api, version in answer["versions"].items()}

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(
        self,
        api: int,
        *body: Readable,
        correlation_id: int | None = None,
        version: int | None = None,
    ) -> int:
        """Returns the correlation id. `version`: the one that the handshake chose unless given."""
        if correlation_id is None:
            correlation_id, self._next = self._next, self._next + 1
        known = self.versions.get(api, 1) if version is None else version
        self._socket.send_multipart(encode_request(api, known, correlation_id, body))
        return correlation_id

    def answer(self, correlation_id: int) -> tuple[ErrorCode, list[bytes]]:
        """Wait for it."""
        while correlation_id not in self._answers:
            frames = self._socket.recv_multipart()
            header = decode_response_header(frames[0])
            if (
                header.correlation_id != PUSH_CORRELATION_ID
                or correlation_id == PUSH_CORRELATION_ID
            ):
                self._answers[header.correlation_id] = header, frames[1:]
        header, body = self._answers.pop(correlation_id)
        return code_of(header.error), body

    def pushed(self, api: int) -> dict[str, Any]:
        """Wait for the next thing that this API says without being asked; answers that come
        meanwhile are kept.
        """
        while True:
            frames = self._socket.recv_multipart()
            header = decode_response_header(frames[0])
            if header.correlation_id != PUSH_CORRELATION_ID:
                self._answers[header.correlation_id] = header, frames[1:]
            elif header.api == api:
                value: dict[str, Any] = orjson.loads(frames[1])
                return value

    def ask(self, api: int, value: dict[str, Any] | bytes) -> tuple[ErrorCode, dict[str, Any]]:
        """A request in JSON and its answer."""
        code, body = self.answer(
            self.send(api, value if isinstance(value, bytes) else orjson.dumps(value))
        )
        return code, orjson.loads(body[0]) if body else {}

    def produce(
        self,
        batches: Sequence[tuple[bytes, int, Readable]],
        *,
        acks: int = 1,
        timeout_ms: int = 30_000,
        cuts: Sequence[int] = (),
    ) -> int:
        """A PRODUCE request of version 2 with batches for (topic id, partition). `cuts`: before
        which batches a new frame begins; none: one frame.
        """
        entries = [
            produce_messages.ProduceEntry(topic_id, partition, 0, len(batch))
            for topic_id, partition, batch in batches
        ]
        head = produce_messages.encode_produce_batches(
            produce_messages.ProduceBatches(acks, timeout_ms, entries)
        )
        ends = [0, *cuts, len(batches)]
        frames = [b"".join(bytes(batch) for _, _, batch in batches[a:b]) for a, b in pairwise(ends)]
        return self.send(Api.PRODUCE, head, *frames, version=2)

    def produced(
        self, correlation_id: int
    ) -> tuple[ErrorCode, list[produce_messages.ProducedEntry]]:
        code, body = self.answer(correlation_id)
        return code, produce_messages.decode_produced_batches(
            body[0]
        ) if code is ErrorCode.OK else []

    def fetch(self, request: fetch_messages.FetchRequest) -> int:
        return self.send(Api.FETCH, fetch_messages.encode_fetch(request))

    def fetched(
        self, correlation_id: int
    ) -> tuple[ErrorCode, list[tuple[fetch_messages.FetchedEntry, memoryview]]]:
        code, body = self.answer(correlation_id)
        return code, fetch_messages.decode_fetched(body) if code is ErrorCode.OK else []
