"""A client's side of one connection, sans-IO: handshake, versions, correlation ids, credit, and when to give the connection up.

    NEW --start()--> HANDSHAKING --handshake answered--> READY --another generation, SESSION_UNKNOWN--> LOST
                          '------ refused --------------------------------------------------------------> LOST

Feed it the frames that came, send the frames that it returns. A LOST session is thrown away with its socket; its owner sends again what was not answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tailrace.formats.checksum import Readable
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode, code_of
from tailrace.protocol.wire import (
    API_VERSIONS,
    PUSH_CORRELATION_ID,
    Api,
    WireError,
    check_body,
    encode_request,
    response_fields,
)

CLIENT_JSON_MAX_BYTES = 64 << 20
_HANDSHAKE_CORRELATION_ID = 1


class State(Enum):
    """Of a session: see the module's diagram."""

    NEW = 1
    HANDSHAKING = 2
    READY = 3
    LOST = 4


_READY, _SESSION_UNKNOWN, _CREDIT = State.READY, int(ErrorCode.SESSION_UNKNOWN), int(Api.CREDIT)
"""To look a member of an enumeration up by its name takes as long as everything else that an answer asks for."""


@dataclass(slots=True)
class Response:
    """An answer to the request `correlation_id`."""

    correlation_id: int
    api: int
    code: ErrorCode
    body: list[Readable]

    def detail(self) -> str:
        """The sentence of a refusal."""
        if not self.body:
            return ""
        try:
            return str(requests.decode_json(self.body[0]).get("message", ""))
        except WireError:
            return ""


class ClientSession:
    """The state machine."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self.state = State.NEW
        self.lost_code = ErrorCode.OK
        self.lost_reason = ""
        self.credit_limit = 0
        self.sent_bytes = 0
        """Bytes of batches sent on this connection; may not pass `credit_limit`."""
        self.generation = 0
        self.cluster_id = ""
        self.auto_create_topics = False
        self._versions: dict[int, int] = {}
        self._next_correlation_id = _HANDSHAKE_CORRELATION_ID + 1

    def start(self) -> list[Readable]:
        """The handshake's frames."""
        self.state = State.HANDSHAKING
        body = requests.encode_json({"versions": {str(int(a)): list(v) for a, v in API_VERSIONS.items()}, "client_id": self._client_id})
        return encode_request(Api.HANDSHAKE, 1, _HANDSHAKE_CORRELATION_ID, [body])

    def request(self, api: Api, body: Sequence[Readable] = ()) -> tuple[int, list[Readable]]:
        """(correlation id, frames) of a request. Raises WireError when the server speaks no common version of this API."""
        version = self._versions.get(api)
        if version is None:
            raise WireError(ErrorCode.UNSUPPORTED_VERSION, f"the appliance speaks no version of {api.name} that this client knows")
        correlation_id = self._next_correlation_id
        self._next_correlation_id += 1
        return correlation_id, encode_request(api, version, correlation_id, body)

    def version(self, api: Api) -> int:
        """The version of an API that this connection speaks; 0: none."""
        return self._versions.get(api, 0)

    def may_send(self, batch_bytes: int) -> bool:
        """Whether the front has granted credit for a batch of so many bytes."""
        return self.sent_bytes + batch_bytes <= self.credit_limit

    def receive(self, frames: Sequence[Readable]) -> Response | None:
        """Take in one message; a Response when it answers a request, or is a push that is not about credit (then its correlation id is PUSH_CORRELATION_ID).
        Raises WireError for frames that are not of this protocol.
        """
        if not frames:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "an empty message")
        _, api, _, correlation_id, error, _, body_length, credit_limit, generation, _ = response_fields(frames[0])
        body = list(frames[1:])
        check_body(body_length, body)
        code = code_of(error)
        if self.state is not _READY:
            if self.state is State.HANDSHAKING:
                self._receive_handshake(correlation_id, code, credit_limit, generation, body)
            return None
        if error == _SESSION_UNKNOWN or generation != self.generation:
            self._lose(ErrorCode.SESSION_UNKNOWN, "the appliance has restarted")
            return None
        self.credit_limit = credit_limit
        if correlation_id == PUSH_CORRELATION_ID and api == _CREDIT:
            return None
        return Response(correlation_id, api, code, body)

    def _receive_handshake(self, correlation_id: int, code: ErrorCode, credit_limit: int, generation: int, body: list[Readable]) -> None:
        if correlation_id != _HANDSHAKE_CORRELATION_ID:
            return
        if code is not ErrorCode.OK or not body:
            self._lose(code, Response(correlation_id, 0, code, body).detail())
            return
        answer = requests.decode_json(body[0])
        versions = answer.get("versions")
        if not isinstance(versions, dict):
            raise WireError(ErrorCode.MALFORMED_REQUEST, "a handshake answer without versions")
        self._versions = {int(api): int(version) for api, version in versions.items()}
        self.generation = generation
        self.credit_limit = credit_limit
        self.cluster_id = str(answer.get("cluster_id", ""))
        self.auto_create_topics = bool(answer.get("auto_create_topics", False))
        self.state = State.READY

    def _lose(self, code: ErrorCode, reason: str) -> None:
        self.state = State.LOST
        self.lost_code = code
        self.lost_reason = reason
