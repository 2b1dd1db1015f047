"""The client's side of a connection, without I/O: handshake, versions, correlation ids and credit.

    NEW --start()--> HANDSHAKING --handshake response--> READY
    HANDSHAKING --rejected--> LOST
    READY --another generation, SESSION_UNKNOWN--> LOST

The owner passes in received frames and sends the returned ones. It discards a LOST session with its
socket, and sends the requests without a response again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.format.crc32c import Readable
from tailrace.protocol import json_messages
from tailrace.protocol.frame import (
    API_VERSIONS,
    JSON_MAX_BYTES,
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
    """The state of a session, as in the module's diagram."""

    NEW = 1
    HANDSHAKING = 2
    READY = 3
    LOST = 4


_READY, _SESSION_UNKNOWN, _CREDIT = State.READY, int(ErrorCode.SESSION_UNKNOWN), int(Api.CREDIT)
"""Constants for hot paths: an enumeration's member lookup costs as
much as the rest of a response.
"""


@dataclass(slots=True)
class Response:
    """An answer to the request `correlation_id`."""

    correlation_id: int
    api: int
    code: ErrorCode
    body: list[Readable]

    def detail(self) -> str:
        """The message of an error response, "" if there is none."""
        if not self.body:
            return ""
        try:
            return str(json_messages.decode_json(self.body[0]).get("message", ""))
        except WireError:
            return ""


class ClientSession:
    """The state machine of one connection."""

    def __init__(
        self,
        client_id: str,
        first_correlation_id: int = _HANDSHAKE_CORRELATION_ID + 1,
        acting_for: str = "",
    ) -> None:
        """`first_correlation_id`: of the first request after the handshake. `acting_for`: JSON of
        the user whom the appliance's own client acts for; empty: none.
        """
        self._client_id = client_id
        self._acting_for = acting_for
        self.state = State.NEW
        self.lost_code = ErrorCode.OK
        self.lost_reason = ""
        self.credit_limit = 0
        self.sent_bytes = 0
        """Bytes of batches sent on this connection, never above `credit_limit`."""
        self.generation = 0
        self.cluster_id = ""
        self.auto_create_topics = False
        self.server_keys: tuple[str, ...] = ()
        """Public keys of an appliance with users: the one in use, and the next one."""
        self._versions: dict[int, int] = {}
        self._next_correlation_id = first_correlation_id

    def start(self) -> list[Readable]:
        """Begin the handshake and return its frames."""
        self.state = State.HANDSHAKING
        body = json_messages.encode_json(
            {
                "versions": {str(int(a)): list(v) for a, v in API_VERSIONS.items()},
                "client_id": self._client_id,
                **({"acting_for": self._acting_for} if self._acting_for else {}),
            }
        )
        return encode_request(Api.HANDSHAKE, 1, _HANDSHAKE_CORRELATION_ID, [body])

    def request(self, api: Api, body: Sequence[Readable] = ()) -> tuple[int, list[Readable]]:
        """Encode a request: (correlation id, frames).

        Raises WireError if the server has no version of this API in common, and for more JSON than
        a request may have: the server would refuse it, or even close the connection.
        """
        version = self._versions.get(api)
        if version is None:
            raise WireError(
                ErrorCode.UNSUPPORTED_VERSION,
                f"the appliance has no version of {api.name} that this client supports; upgrade "
                "the older of the two",
            )
        if len(body) == 1 and len(body[0]) > JSON_MAX_BYTES:
            raise WireError(
                ErrorCode.REQUEST_TOO_LARGE,
                f"{api.name} would have {len(body[0])} bytes of JSON; the limit is "
                f"{JSON_MAX_BYTES}: ask for less at once",
            )
        correlation_id = self._next_correlation_id
        self._next_correlation_id += 1
        return correlation_id, encode_request(api, version, correlation_id, body)

    def version(self, api: Api) -> int:
        """The version of an API on this connection, 0 if there is none."""
        return self._versions.get(api, 0)

    def may_send(self, batch_bytes: int) -> bool:
        """True if the credit allows a batch of this size."""
        return self.sent_bytes + batch_bytes <= self.credit_limit

    def receive(self, frames: Sequence[Readable]) -> Response | None:
        """Handle one message; return a Response if it belongs to a request.

        A push with a body is also returned, with PUSH_CORRELATION_ID. Raises WireError
        for frames that do not follow the protocol.
        """
        if not frames:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "the message has no frames")
        _, api, _, correlation_id, error, _, body_length, credit_limit, generation, _ = (
            response_fields(frames[0])
        )
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
        if correlation_id == PUSH_CORRELATION_ID and api == _CREDIT and not body:
            return None
        return Response(correlation_id, api, code, body)

    def _receive_handshake(
        self,
        correlation_id: int,
        code: ErrorCode,
        credit_limit: int,
        generation: int,
        body: list[Readable],
    ) -> None:
        if correlation_id != _HANDSHAKE_CORRELATION_ID:
            return
        if code is not ErrorCode.OK or not body:
            self._lose(code, Response(correlation_id, 0, code, body).detail())
            return
        answer = json_messages.decode_json(body[0])
        versions = answer.get("versions")
        if not isinstance(versions, dict):
            raise WireError(ErrorCode.MALFORMED_REQUEST, "the handshake response has no versions")
        self._versions = {int(api): int(version) for api, version in versions.items()}
        self.generation = generation
        self.credit_limit = credit_limit
        self.cluster_id = str(answer.get("cluster_id", ""))
        self.auto_create_topics = bool(answer.get("auto_create_topics", False))
        keys = answer.get("server_keys")
        if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
            self.server_keys = tuple(keys)
        self.state = State.READY

    def _lose(self, code: ErrorCode, reason: str) -> None:
        self.state = State.LOST
        self.lost_code = code
        self.lost_reason = reason
