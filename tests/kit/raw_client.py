"""A client that keeps to nothing: frames of a test's own on a socket of its own, past the SDK."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import orjson
import zmq

from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode, code_of
from tailrace.protocol.wire import API_VERSIONS, PUSH_CORRELATION_ID, Api, ResponseHeader, decode_response_header, encode_request

ANSWER_TIMEOUT_MS = 60_000


class RawClient:
    """One DEALER. Requests go out with any body; answers come back by correlation id."""

    def __init__(self, address: str, *, handshake: bool = True) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, ANSWER_TIMEOUT_MS)
        self._socket.setsockopt(zmq.SNDTIMEO, ANSWER_TIMEOUT_MS)
        self._socket.connect(address)
        self._next = 1
        self._answers: dict[int, tuple[ResponseHeader, list[bytes]]] = {}
        if handshake:
            try:
                self._shake()
            except BaseException:
                self.close()
                raise

    def _shake(self) -> None:
        offered = {str(int(api)): list(versions) for api, versions in API_VERSIONS.items()}
        assert self.ask(Api.HANDSHAKE, {"versions": offered, "client_id": "raw"})[0] is ErrorCode.OK

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(self, api: int, *body: bytes, correlation_id: int | None = None) -> int:
        """Returns the correlation id."""
        if correlation_id is None:
            correlation_id, self._next = self._next, self._next + 1
        low_high = API_VERSIONS.get(Api(api)) if api in set(Api) else None
        self._socket.send_multipart(encode_request(api, low_high[1] if low_high else 1, correlation_id, body))
        return correlation_id

    def answer(self, correlation_id: int) -> tuple[ErrorCode, list[bytes]]:
        """Wait for it."""
        while correlation_id not in self._answers:
            frames = self._socket.recv_multipart()
            header = decode_response_header(frames[0])
            if header.correlation_id != PUSH_CORRELATION_ID or correlation_id == PUSH_CORRELATION_ID:
                self._answers[header.correlation_id] = header, frames[1:]
        header, body = self._answers.pop(correlation_id)
        return code_of(header.error), body

    def pushed(self, api: int) -> dict[str, Any]:
        """Wait for the next thing that this API says without being asked; answers that come meanwhile are kept."""
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
        code, body = self.answer(self.send(api, value if isinstance(value, bytes) else orjson.dumps(value)))
        return code, orjson.loads(body[0]) if body else {}

    def fetch(self, request: requests.FetchRequest) -> int:
        return self.send(Api.FETCH, requests.encode_fetch(request))

    def fetched(self, correlation_id: int) -> tuple[ErrorCode, list[tuple[requests.FetchedEntry, memoryview]]]:
        code, body = self.answer(correlation_id)
        return code, requests.decode_fetched(body) if code is ErrorCode.OK else []
